# Writes all that differs between the commit $2 and the folder $1 into a file, and says which (`out=`); $3 is the git to
# use, $4 the most bytes that the diff may have. Run by bash in a new shell of the sandbox.
#
# Nothing of the repository's own is believed but its objects: index, settings, attributes and refs are made anew in a
# temporary git folder, so hooks, filters, aliases and what else the agent may have set have no say.
# The file beside it, .whole, has the changed files of settings with all their lines. Ends with 3 and `why=` where no diff can be had.
set -u -o pipefail
W=$1 BASE=$2 GIT=$3 MOST=$4
why() { printf 'why=%s\n' "$*"; exit 3; }

for name in $(compgen -e | grep -E '^(GIT_|LD_|BASH_)'); do unset "$name"; done
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH LC_ALL=C
[ -d "$W" ] || why "the folder $W is gone"
cd "$W" || why "the folder $W can't be entered"
[ -x "$GIT" ] || why "$GIT is gone"
objects=$W/.git/objects
[ -d "$objects" ] || why "the repository's .git is gone"
OUT=$(mktemp -p "${HOME:-/tmp}" .rollout-patch-XXXXXX || mktemp) || why "no file can be made: is the disk full?"
T=$(mktemp -d) || why "no temporary folder can be made: is the disk full?"
trap 'rm -rf "$T"' EXIT
export HOME=$T XDG_CONFIG_HOME=$T GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_LITERAL_PATHSPECS=1 GIT_NO_LAZY_FETCH=1
printf '[safe]\n\tdirectory = *\n[init]\n\tdefaultBranch = main\n' > "$T/.gitconfig"

format=; [ ${#BASE} = 40 ] || format=--object-format=sha256
"$GIT" init -q --template= $format "$T/made" > "$T/said" 2>&1 || why "git does not run: $(head -c 200 "$T/said")"
export GIT_DIR=$T/made/.git GIT_WORK_TREE=$W
mkdir -p "$GIT_DIR/info"
printf '%s\n' "$objects" > "$GIT_DIR/objects/info/alternates"
printf '* -text -filter -ident -working-tree-encoding !diff\n' > "$GIT_DIR/info/attributes"
cat "$W/.git/info/exclude" > "$GIT_DIR/info/exclude" 2>/dev/null
cat >> "$GIT_DIR/config" <<'EOF'
[core]
	filemode = true
	symlinks = true
	autocrlf = false
	fsmonitor = false
	hooksPath = /dev/null
[gc]
	auto = 0
EOF
git() { "$GIT" "$@" 2>> "$T/said"; }
broken() { why "the repository can't be read any more: $(grep -v '^warning' "$T/said" | head -1 | head -c 200)"; }

git cat-file -e "$BASE^{tree}" || why "the repository's .git does not have the commit $BASE any more"
git read-tree "$BASE" || broken
git add -u --ignore-errors -- . || [ -s "$GIT_DIR/index" ] || broken
# New files: those that git would add, and those that the agent added although they are ignored. A repository within
# the repository (its name ends with a slash) can't travel in a patch.
git ls-files -o -z --exclude-standard > "$T/others" || broken
if [ -f .git/index ]; then
	GIT_INDEX_FILE=$W/.git/index git diff-index --cached --no-renames --diff-filter=A --name-only -z "$BASE" -- |
		while IFS= read -r -d '' name; do
			if [ -L "$name" ] || [ -f "$name" ]; then printf '%s\0' "$name"; fi
		done >> "$T/others"
fi
grep -zv '/$' "$T/others" > "$T/new"
git update-index --add --replace -z --stdin < "$T/new" || broken
grep -z '/$' "$T/others" | sort -zu | tr '\n\0' '?\n' > "$OUT.nested"

asked=(--cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --ignore-submodules=all
	--src-prefix=a/ --dst-prefix=b/)
git diff "${asked[@]}" "$BASE" -- > "$OUT" || broken
size=$(wc -c < "$OUT")
[ "$size" -le "$MOST" ] || why "the patch has $size bytes, more than the $MOST that are taken"
unset GIT_LITERAL_PATHSPECS
git diff "${asked[@]}" -U1000000 "$BASE" -- ':(glob)**/setup.cfg' ':(glob)**/pyproject.toml' ':(glob)**/package.json' > "$OUT.whole" || broken
[ "$(wc -c < "$OUT.whole")" -le "$MOST" ] || why "setup.cfg, pyproject.toml or package.json became larger than $MOST bytes"
printf 'out=%s\n' "$OUT"
