#!/usr/bin/env bash
# All tests but the long ones: tests.sh PYTEST ARGS... Those that mostly wait run in three processes, file by file; those
# that kill processes and measure leases have the machine to themselves.
set -uo pipefail
pytest=$1
shift
failed=0
run() {
    "$pytest" -m "not slow" "$@" </dev/null
    local code=$?
    [ "$code" = 0 ] || [ "$code" = 5 ] || failed=$code # 5: ARGS chose none of these
}
beside=(tests/faults/test_{sandbox,policy,weights}_*.py tests/faults/test_host_storm.py)
run tests/unit tests/integration "${beside[@]}" -n "${JOBS:-3}" --dist loadfile "$@"
run tests/faults "${beside[@]/#/--ignore=}" "$@"
exit "$failed"
