# Puts the repository at $1 at the commit $2, with the history that leads there and nothing else. Run by bash.
#
# The repository gets a new .git, made beside the old one: one pack of the commits that lead to the base, one branch, no
# remote, no reflog, a configuration of ours. What the image changed in tracked files (a line of setup.py that its build
# needed) is committed on top, so that the tree is clean; what is untracked is listed in .git/info/exclude and stays.
# Prints `start=`, `git=`, `history=`; ends with 3 where the task is wrong, with 4 where the machine is.
set -u -o pipefail
W=$1 BASE=$2 NEW=.git.rollout
OURS="What this environment changed" THEIRS="SWE-bench"
wrong() { printf 'wrong=%s\n' "$*"; exit 3; }
broken() { printf 'broken=%s\n' "$*"; exit 4; }

GIT=$(type -P git) || wrong "the image has no git"
[ -d "$W" ] || wrong "the image has no folder $W"
cd "$W" || broken "the folder $W can't be entered"
HOME_BEFORE=${HOME:-/root}
for name in $(compgen -e | grep '^GIT_'); do unset "$name"; done
T=$(mktemp -d) || broken "no temporary folder can be made: is the disk full?"
trap 'rm -rf "$T"' EXIT
export HOME=$T XDG_CONFIG_HOME=$T LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_GRAFT_FILE=$T/none
export GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 GIT_NO_LAZY_FETCH=1

# For the old repository, whoever owns it and whatever its own settings say.
cat > "$T/.gitconfig" <<'EOF'
[safe]
	directory = *
[init]
	defaultBranch = main
EOF
PLAIN=(-c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false -c gc.auto=0 -c submodule.recurse=false
	-c core.sparseCheckout=false -c filter.lfs.clean=cat -c filter.lfs.smudge=cat -c filter.lfs.process=
	-c filter.lfs.required=false)
old() { "$GIT" --git-dir="$W/.git" --work-tree="$W" "${PLAIN[@]}" "$@"; }
new() { "$GIT" --git-dir="$W/$NEW" --work-tree="$W" "$@"; }

# Some overlays can't remove a folder that the image has: it is enough that nothing is in it any more.
empty() {
	rm -rf "$1" 2> /dev/null
	[ ! -e "$1" ] || [ -z "$(find "$1" ! -type d -print -quit 2>&1)" ]
}

build() {
	[ -e .git ] || {
		found=$(find / -maxdepth 3 -name .git -not -path '/proc/*' 2>/dev/null | head -5 | xargs -r dirname | tr '\n' ' ')
		wrong "there is no git repository at $W (there are: ${found:-none}); set \`workdir\`"
	}
	rm -rf "$NEW"
	rm -f .git/index.lock .git/HEAD.lock
	base=$(old rev-parse -q --verify "$BASE^{commit}") || {
		head=$(old rev-parse -q --verify HEAD) || wrong "the git repository at $W is broken: $(old rev-parse HEAD 2>&1 | head -1)"
		[ -f "$(old rev-parse --git-common-dir)/shallow" ] && shallow="; it is a shallow one" || shallow=
		wrong "the repository at $W has no commit $BASE (its HEAD is $head$shallow)"
	}
	head=$(old rev-parse -q --verify "HEAD^{commit}") || head=
	start=$base
	if [ "$head" != "$base" ]; then
		case $(old log -1 --format='%P %s' "${head:-$base}") in
			"$base $THEIRS" | "$base $OURS") start=$head ;;
			*) old checkout -q -f --detach "$base" > "$T/said" 2>&1 || wrong "$base can't be checked out: $(tail -1 "$T/said")" ;;
		esac
	fi

	format=; [ ${#base} = 40 ] || format=--object-format=sha256
	"$GIT" init -q --template= $format "$T/empty" || broken "git init failed"
	cp -R "$T/empty/.git" "$NEW" || broken "$W can't be written: is the disk full?"
	printf '%s\n' "$start" | old pack-objects --revs --quiet --delta-base-offset "$W/$NEW/objects/pack/pack" \
		> /dev/null 2> "$T/said" || wrong "the history of $start can't be read: $(tail -1 "$T/said")"
	shallow=$(old rev-parse --git-common-dir)/shallow
	if [ -f "$shallow" ]; then
		while read -r commit; do new cat-file -e "$commit" 2>/dev/null && printf '%s\n' "$commit"; done < "$shallow" > "$T/shallow"
		[ -s "$T/shallow" ] && cp "$T/shallow" "$NEW/shallow"
	fi
	mkdir -p "$NEW/info"
	# Bytes as they are, whatever the repository's own attributes say: a patch must not depend on conversions.
	printf '* -text -filter -ident -working-tree-encoding\n' > "$NEW/info/attributes"
	: > "$NEW/info/exclude"
	cat >> "$NEW/config" <<'EOF'
[core]
	autocrlf = false
	fsmonitor = false
	hooksPath = .git/hooks
[gc]
	auto = 0
[commit]
	gpgsign = false
[user]
	name = agent
	email = agent@localhost
EOF
	new read-tree "$start" || broken "the index can't be written: is the disk full?"
	# A submodule's files stay; its own history goes.
	new ls-files -s -z | while IFS= read -r -d '' line; do
		case $line in 160000*) empty "${line#*	}/.git" || broken "${line#*	}/.git can't be removed" ;; esac
	done
	new add -u -- . 2> "$T/said" || broken "the tree can't be read: $(tail -1 "$T/said")"
	tree=$(new write-tree) || broken "the tree can't be written: is the disk full?"
	if [ "$tree" != "$(new rev-parse "$start^{tree}")" ]; then
		date=$(new log -1 --format=%cd --date=raw "$start")
		export GIT_AUTHOR_DATE=$date GIT_COMMITTER_DATE=$date GIT_AUTHOR_NAME=environment GIT_COMMITTER_NAME=environment
		export GIT_AUTHOR_EMAIL=environment@localhost GIT_COMMITTER_EMAIL=environment@localhost
		start=$(new commit-tree "$tree" -p "$start" -m "$OURS") || broken "a commit can't be written: is the disk full?"
	fi
	printf 'ref: refs/heads/main\n' > "$NEW/HEAD"
	new update-ref refs/heads/main "$start" || broken "a branch can't be written: is the disk full?"

	# Files one by one, so that a new one beside them is seen; folders where they are too many.
	others() { new ls-files -o -z --exclude-standard -x "/$NEW" "$@"; }
	folders=; [ "$(others | tr -dc '\0' | wc -c)" -le 2000 ] || folders=--directory
	others $folders | sed -z 's/[][\\*?]/\\&/g; s/\n/?/g; s/ $/\\ /; s,^,/,' | tr '\0' '\n' > "$T/exclude"
	cp "$T/exclude" "$NEW/info/exclude"

	common=$(cd "$(old rev-parse --git-common-dir)" && pwd -P) || common=
	{
		[ -z "$common" ] || [ "$common" = "$W/.git" ] || printf '%s\n' "$common"
		while read -r place; do (cd "$common/objects" && cd "$place" && pwd -P); done 2>/dev/null < "$common/objects/info/alternates"
	} 2>/dev/null > "$NEW/elsewhere"
	: > "$NEW/complete"
}

# Whether folders of the image can be removed and made again here: an overlay without attributes of its own can't.
whole_overlay() {
	for name in hooks branches description.d; do
		[ -d ".git/$name" ] || continue
		rm -rf ".git/$name" 2> /dev/null && mkdir ".git/$name" 2> /dev/null
		return
	done
	return 1
}

[ -f "$NEW/complete" ] || build
if [ ! -d .git ] || whole_overlay; then
	rm -rf .git && mv "$NEW" .git
else
	find .git ! -type d -delete && cp -al "$NEW/." .git/
fi 2> "$T/said" || broken "the new .git can't be put in its place: $(tail -1 "$T/said")"
while read -r place; do
	empty "$place" || wrong "objects of the repository lie at $place, which can't be removed, and may show the fix"
done < .git/elsewhere
rm -rf "$NEW" .git/complete .git/elsewhere

# As the agent will see it.
export HOME=$HOME_BEFORE
unset GIT_CONFIG_NOSYSTEM XDG_CONFIG_HOME GIT_NO_REPLACE_OBJECTS
"$GIT" rev-parse --git-dir > /dev/null 2>&1 || "$GIT" config --global --add safe.directory "$W"
dirty=$("$GIT" status --porcelain 2>&1) || broken "git status fails: $dirty"
[ -z "$dirty" ] || broken "the repository is not clean after it was prepared: $(printf '%s' "$dirty" | head -3 | tr '\n' ' ')"
printf 'start=%s\ngit=%s\nhistory=%s\n' "$("$GIT" rev-parse HEAD)" "$GIT" "$("$GIT" rev-list --count HEAD)"
