"""Goes into a sandbox as `sitecustomize.py`: in a pytest runner, loads the report's plugin before anything else does.

Python imports it before it looks at the folder it was started in, so that nothing of the repository has run by then.
For Python 3.6 and later. `PLUGIN` is replaced by the plugin's random name.
"""

import os
import sys

PLUGIN = "rollout_plugin_name"


def _is_runner() -> bool:
    """Whether this process was started as pytest: `.../pytest`, or with `-m pytest`."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    names = (b"pytest", b"py.test")
    scripts = [os.path.basename(word) in names for word in words[:2]]
    modules = [words[at : at + 2] in ([b"-m", names[0]], [b"-m", names[1]]) for at in range(len(words))]
    return any(scripts + modules)


def _load() -> None:
    """Import the plugin with Python's own folders first, so that no module of the repository stands in for another's.

    Where pytest is the repository itself, it is found by the second try.
    """
    here, before = os.getcwd() + os.sep, list(sys.path)
    sys.path[:] = [place for place in before if place and not (os.path.abspath(place) + os.sep).startswith(here)]
    try:
        __import__(PLUGIN)
    except ImportError:
        sys.path[:] = before
        try:
            __import__(PLUGIN)
        except ImportError as error:
            sys.stderr.write("the tests' report can't be kept: %s\n" % error)  # noqa: UP031 (Python 3.6)
    finally:
        sys.path[:] = before


def _next() -> None:
    """Run the `sitecustomize` that this one stands before."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    ours = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if os.path.abspath(place) != ours])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if _is_runner():
        _load()
    _next()
