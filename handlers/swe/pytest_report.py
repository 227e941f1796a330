"""A pytest plugin that goes into a sandbox: it reports a run as no printed text can. PYTEST_DONT_REWRITE

For Python 3.6 and pytest 5 and later, without dependencies; it is uploaded under a random name and never imported by a
worker. It takes a key from a file beside it, which it removes at once, and writes lines of JSON, each with a code that
only the key's holder can make. Each line changes the key: who finds it later can't rewrite what was said before.

It believes no outcome alone: a test has passed only if its function was seen to be called and raised nothing; tests of
its own (canaries) that must fail are put among the others; and pytest's functions must stay the ones that they were.
"""

import json
import os
import random
import sys
from hashlib import blake2b, sha256
from time import perf_counter
from typing import Any

import _pytest.python
import _pytest.runner
import pytest

from handlers.swe.pytest_watch import Watch, code_of

START = os.getcwd()
FOLDER = os.path.dirname(os.path.abspath(__file__))

CANARIES = 6
LONGEST = 400
SHARE = 0.1
"""Of the time, for looks at pytest's functions between tests; one takes a millisecond."""

RANKS = ("passed", "skipped", "failed")


class Report:
    """The file of signed lines."""

    def __init__(self, key: bytes) -> None:
        self._key, self._before = key, b""
        self._dumps, self._write, self._mac = json.dumps, os.write, blake2b
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(os.path.join(FOLDER, "report"), flags, 0o600)

    def add(self, kind: str, **about: Any) -> None:
        line = self._dumps({"kind": kind, **about}).encode("ascii")
        self._before = self._mac(self._before + line, key=self._key, digest_size=16).digest()
        self._key = self._mac(b"next", key=self._key, digest_size=32).digest()
        self._write(self._file, line + b" " + self._before.hex().encode("ascii") + b"\n")


class Recorder:
    """What happens in one session. `changed`: files of the patch that had nothing to do with pytest before it."""

    def __init__(self, report: Report, watch: Watch, changed: Any) -> None:
        self._report, self._watch, self._changed = report, watch, changed
        self._clock, self._looked, self._cost = perf_counter, 0.0, 0.0
        self._chance = random.SystemRandom()
        self._run = _pytest.runner.runtestprotocol
        self._places = set()  # type: set[int]
        self._marked = set()  # type: set[str]
        self._at, self._is_canary = 0, False
        self._phases = []  # type: list[Any]
        self._raised = None  # type: Any
        self._functions = {}  # type: dict[Any, Any]
        self._seen = {}  # type: dict[int, Any]
        self._body_ran = False

    def pytest_plugin_registered(self, plugin: Any) -> None:
        """Also one that goes again before anybody looks."""
        for name in dir(plugin):
            if name.startswith("pytest_") and self._is_planted(getattr(plugin, name, None)):
                self._report.add("forged", why="the patch puts itself into %s" % name)  # noqa: UP031 (Python 3.6)

    def pytest_sessionstart(self, session: Any) -> None:
        self._report.add("begin", pytest=pytest.__version__, python=sys.version.split()[0])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: Any) -> Any:
        """What a test file says in the moment in which it is read: it may be put back afterwards."""
        if isinstance(collector, pytest.Module):
            path = str(getattr(collector, "path", None) or collector.fspath)
            try:
                with open(path, "rb") as file:
                    self._report.add("file", path=os.path.realpath(path), digest=sha256(file.read()).hexdigest())
            except OSError:
                pass  # pytest says so itself
        yield

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._report.add("uncollected", test=report.nodeid, text=str(report.longrepr)[-LONGEST:])

    def pytest_collection_finish(self, session: Any) -> None:
        self._marked = {item.nodeid for item in session.items if item.get_closest_marker("xfail")}
        for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
            self._watch.add(module.__name__, vars(module))
        self._functions = {item: _function(item) for item in session.items if isinstance(item, pytest.Function)}
        for item, function in self._functions.items():
            if self._is_another(item, function):
                self._report.add("forged", why="the function of %s was replaced" % _name(item))  # noqa: UP031
        self._look(session.config)
        count = len(session.items)
        self._places = {0, count - 1, *self._chance.sample(range(count), min(CANARIES, count))}
        self._at = 0
        self._report.add("collected", count=count)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        at, self._at = self._at, self._at + 1
        if at in self._places:
            for wanted in self._chance.sample(["failed", "passed"], 2):
                self._canary(item, wanted)
        self._report.add("start", test=_name(item))
        self._phases, self._raised = [], None
        yield
        self._report.add("test", test=_name(item), status=self._status(item))
        if self._clock() - self._looked > self._cost / SHARE:
            self._look(item.config)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        """The innermost of all wrappers: what the function did, before anybody could change it."""
        function = _function(pyfuncitem)
        if function is not self._functions.get(pyfuncitem, function) and self._is_planted(function):
            self._report.add("forged", why="the function of %s was replaced" % _name(pyfuncitem))  # noqa: UP031
        outcome = yield
        self._raised = outcome.excinfo is not None

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """The outermost: what came of it."""
        outcome = yield
        report = outcome.get_result()
        if call.when == "setup":
            self._phases = []  # another try of the same test
        xfail = hasattr(report, "wasxfail") and (item.nodeid in self._marked or _raised_in(call, item))
        self._phases.append((call.when, report.outcome, xfail, hasattr(report, "wasxfail")))

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._report.add("broken", text=str(excrepr)[-LONGEST:])

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        yield
        self._look(session.config)
        for name, function in self._watch.testing():
            if self._is_planted(function, made=False):
                self._report.add("forged", why="%s was replaced" % name)  # noqa: UP031 (Python 3.6)
        self._report.add("end", exit=int(exitstatus))

    def _status(self, item: Any) -> str:
        """The word of pytest's summary for a test."""
        if any(outcome == "failed" for when, outcome, _, _ in self._phases if when != "call"):
            return "ERROR"
        calls = [phase for phase in self._phases if phase[0] == "call"] or self._phases[:1]
        if not calls:
            return "NOTHING"
        when, outcome, expected, told = max(calls, key=lambda phase: RANKS.index(phase[1]))
        if outcome == "skipped":
            return "XFAIL" if expected else "SKIPPED"
        if outcome == "passed" and when == "setup":
            return "NOTHING"
        if outcome == "passed" and told:
            return "XPASS"
        if outcome == "passed" and (self._raised or (self._raised is None and type(item) is pytest.Function)):
            did = "raised" if self._raised else "was never called"
            self._report.add("forged", why="the function of %s %s" % (item.nodeid, did))  # noqa: UP031 (Python 3.6)
        return "PASSED" if outcome == "passed" else "FAILED"

    def _canary(self, item: Any, wanted: str) -> None:
        """Run a test that must end as `wanted`, as the neighbour of `item`."""
        name = "test_" + "".join(self._chance.choice("abcdeghilmnoprstuvw") for _ in range(9))
        self._body_ran = False

        def body() -> None:
            self._body_ran = True
            if wanted == "failed":
                raise AssertionError("assert 1 == 2")

        body.__name__ = name
        self._phases, self._raised = [], None
        try:
            self._run(_canary(item, name, body), log=False, nextitem=item)
        except Exception as error:
            self._report.add("canary", wanted=wanted, got="%s: %s" % (type(error).__name__, error))  # noqa: UP031
            return
        got = [phase[1] for phase in self._phases if phase[0] == "call"]
        self._report.add("canary", wanted=wanted, got=got[-1] if got else "none", ran=self._body_ran)

    def _look(self, config: Any) -> None:
        began = self._clock()
        changed = self._watch.first_change()
        if changed:
            self._report.add("forged", why="%s was replaced" % changed)  # noqa: UP031 (Python 3.6)
        for name, hook in list(vars(config.hook).items()):
            for found in hook.get_hookimpls() if hasattr(hook, "get_hookimpls") else []:
                if self._seen.get(id(found)) is not found and self._is_planted(found.function):
                    self._report.add("forged", why="the patch puts itself into %s" % name)  # noqa: UP031 (Python 3.6)
                self._seen[id(found)] = found
        for finder in sys.meta_path:
            if finder not in self._watch.finders and self._is_planted(getattr(finder, "find_spec", None)):
                self._report.add("forged", why="the patch puts itself into imports")
        if self._is_planted(sys.gettrace()):
            self._report.add("forged", why="the patch steers the tests as a debugger does")
        self._looked = self._clock()
        self._cost = self._looked - began

    def _is_planted(self, function: Any, made: bool = True) -> bool:
        """Whether a function comes from a file that the patch changed, or (`made`) from none."""
        code = code_of(getattr(function, "__func__", function))
        return code is not None and (
            os.path.realpath(code.co_filename) in self._changed
            or (made and not self._watch.knows(code) and not os.path.exists(code.co_filename))
        )

    def _is_another(self, item: Any, function: Any) -> bool:
        """Whether something of the patch's stands in a test's place; a decorator, which has the test within, may."""
        planted = False
        while function is not None:
            code = code_of(function)
            if code is not None and os.path.realpath(code.co_filename) == os.path.realpath(str(item.fspath)):
                return False
            planted = planted or self._is_planted(function, made=False)
            function = getattr(function, "__wrapped__", None)
        return planted


def _name(item: Any) -> str:
    """The test as pytest's summary names it: with its file's path from where pytest was started."""
    root = str(getattr(item.config, "rootpath", None) or item.config.rootdir)
    file, colons, rest = str(item.nodeid).partition("::")
    return os.path.relpath(os.path.join(root, file), START) + colons + rest if root != START else str(item.nodeid)


def _raised_in(call: Any, item: Any) -> bool:
    """Whether `pytest.xfail()` was called by the test's own file, and not by the code that it tests."""
    files = [entry.frame.code.raw.co_filename for entry in (call.excinfo.traceback if call.excinfo else [])]
    ours = [file for file in files if os.path.basename(os.path.dirname(file)) != "_pytest"]
    return bool(ours) and os.path.realpath(ours[-1]) == os.path.realpath(str(item.fspath))


def _function(item: Any) -> Any:
    return getattr(item.obj, "__func__", item.obj)


class Plain(pytest.Item):
    """A canary beside tests that are no plain functions."""

    body = None  # type: Any

    def runtest(self) -> None:
        self.body()


def _canary(item: Any, name: str, body: Any) -> Any:
    plain = not isinstance(item.parent, pytest.Module)
    cls = Plain if plain else pytest.Function  # type: Any
    about = {} if plain else {"callobj": body}
    make = getattr(cls, "from_parent", None)
    made = make(item.parent, name=name, **about) if make else cls(name, parent=item.parent, **about)
    if plain:
        made.body = body
    return made


def _taken() -> Any:
    """The key, which nobody finds after this, and what goes with it."""
    path = os.path.join(FOLDER, "key")
    try:
        with open(path, "rb") as file:
            key = file.read()
        os.unlink(path)
    except OSError:
        return None  # the process that has it is another: a worker of xdist, a pytest that a test started
    with open(os.path.join(FOLDER, "changed"), "rb") as file:
        changed = {os.path.realpath(os.fsdecode(name)) for name in file.read().split(b"\0") if name}
    return Report(key), Watch(), changed


TAKEN = _taken()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """What the tests start themselves is none of ours."""
    for name, ours in (("PYTHONPATH", FOLDER), ("PYTEST_ADDOPTS", "-p %s" % __name__)):  # noqa: UP031 (Python 3.6)
        os.environ[name] = os.environ.get(name, "").replace(ours, "").strip(os.pathsep + " ")
        if not os.environ[name]:
            del os.environ[name]
    if TAKEN is not None and not early_config.pluginmanager.hasplugin("rollout-recorder"):
        TAKEN[1].settle(early_config.pluginmanager)
        early_config.pluginmanager.register(Recorder(*TAKEN), "rollout-recorder")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_cmdline_main(config: Any) -> Any:
    """All in this process: what a worker of xdist reports, its own tests could have written."""
    option = config.option
    for name, value in (("numprocesses", None), ("dist", "no"), ("distload", False), ("tx", []), ("looponfail", False)):
        if hasattr(option, name):
            setattr(option, name, value)
    yield
