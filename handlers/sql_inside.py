"""SQLite inside a sandbox: `python3 sql_inside.py make|ask REQUEST RESULT`. Python 3.6, standard library only.

`make` builds the database from SQL; `ask` runs one query that can only read. REQUEST and RESULT are JSON files; what
SQLite says of wrong SQL stands in the result's `error`.
"""

import json
import math
import os
import resource
import sqlite3
import sys
import time
from typing import Any, Dict, List, Optional  # noqa: UP035 - Python 3.6 has these names only

MB = 1 << 20
MEMORY = 1024 * MB
MOST = 32 * MB  # bytes of one result
STEPS = 1000  # of SQLite's machine, between two looks at the time
READS = {20, 21, 31, 33}  # SQLITE_READ, SQLITE_SELECT, SQLITE_FUNCTION, SQLITE_RECURSIVE
PRAGMA, UPDATE = 19, 23
SHOWS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}
REFUSED = ("not authorized", "authorization denied", "prohibited")  # what SQLite says after `allowed` said no
FORBIDDEN = {"load_extension", "fts3_tokenizer"}


def allowed(action: int, first: Optional[str], second: Optional[str], *_: Any) -> int:  # noqa: UP045
    """SQLite asks this for everything that a statement would do; reading is all it may."""
    reads = action in READS and not (action == 31 and str(second).lower() in FORBIDDEN)
    builds = action == UPDATE and first == "sqlite_master"  # how json_each is made known; the file itself is read-only
    shows = action == PRAGMA and str(first).lower() in SHOWS
    return sqlite3.SQLITE_OK if reads or builds or shows else sqlite3.SQLITE_DENY


def make(request: Dict[str, Any]) -> Dict[str, Any]:  # noqa: UP006
    """Build `path` (from what lies there, where `kept`) by running `setup`."""
    path = request["path"]
    if not request["kept"] and os.path.exists(path):
        os.unlink(path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("SELECT count(*) FROM sqlite_master").fetchall()  # a file that is no database shows here
    connection.executescript(request["setup"])
    if connection.in_transaction:
        connection.execute("COMMIT")
    connection.close()
    return {"error": ""}


def ask(request: Dict[str, Any]) -> Dict[str, Any]:  # noqa: UP006
    """`columns` and at most `rows` rows of the query; `more`: there are further ones. `cell`: cuts texts, 0 = never."""
    connection = sqlite3.connect("file:" + request["path"] + "?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    for setting in ("query_only = 1", "temp_store = MEMORY"):
        connection.execute("PRAGMA " + setting)
    if hasattr(connection, "setlimit"):
        connection.setlimit(0, MOST)  # SQLITE_LIMIT_LENGTH
    until = time.process_time() + request["seconds"]
    connection.set_authorizer(allowed)
    connection.set_progress_handler(lambda: int(time.process_time() > until), STEPS)
    cursor = connection.execute(request["sql"])
    if cursor.description is None:
        return {"error": "this is no query: it gives no rows"}
    rows: List[Any] = []  # noqa: UP006
    size = 0
    for row in cursor:
        if len(rows) == request["rows"]:
            return {"columns": [item[0] for item in cursor.description], "rows": rows, "more": True, "error": ""}
        rows.append([plain(value, request["cell"]) for value in row])
        size += sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
        if size > MOST and not request["cell"]:
            return {"error": "the result is larger than {} MB".format(MOST // MB)}  # noqa: UP032
    return {"columns": [item[0] for item in cursor.description], "rows": rows, "more": False, "error": ""}


def plain(value: Any, most: int) -> Any:
    if isinstance(value, bytes):
        value = {"blob": value.hex()} if not most else "x'" + value[:most].hex() + "'"
    if most and isinstance(value, str) and len(value) > most:
        return value[:most] + "..."
    return value


def main() -> None:
    act, request_path, result_path = sys.argv[1:4]
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    whole = math.ceil(request["seconds"]) + 2  # one step of SQLite may take long, and is not asked between
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        result = make(request) if act == "make" else ask(request)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, OverflowError) as error:
        why = str(error) or type(error).__name__
        if why == "interrupted":
            why = "it took more than {:g} s of CPU time".format(request["seconds"])
        elif any(word in why for word in REFUSED):
            why = "a query can only read: no writing, no ATTACH, no settings"
        result = {"error": why}
    with open(result_path + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(result_path + ".part", result_path)


if __name__ == "__main__":
    main()
