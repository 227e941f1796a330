#!/usr/bin/env bash
# All tests but the long ones: tests.sh PYTEST ARGS... With CI=true those marked `ci` too. Those that mostly wait run in
# three processes, file by file; then those that kill processes and measure leases, two files at a time.
set -uo pipefail
pytest=$1
shift
failed=0
chosen="not slow and not ci"
[ "${CI:-}" = true ] && chosen="not slow"
run() {
    "$pytest" -m "$chosen" "$@" </dev/null
    local code=$?
    [ "$code" = 0 ] || [ "$code" = 5 ] || failed=$code # 5: ARGS chose none of these
}
beside=(tests/faults/test_{sandbox,policy,weights}_*.py tests/faults/test_host_storm.py)
run tests/unit tests/integration "${beside[@]}" -n "${JOBS:-3}" --dist loadfile "$@"
run tests/faults "${beside[@]/#/--ignore=}" -n 2 --dist loadfile "$@"
exit "$failed"
