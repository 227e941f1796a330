import time, pytest
from tests.faults.test_lost_replies import *
from tests.faults.conftest import *
async def test_x(workers, tmp_path):
    cut=True; times=1
    t0=time.monotonic()
    def p(x): print(x, round(time.monotonic()-t0,2), flush=True)
    log = tmp_path / "starts"
    socket = tmp_path / "proxy.sock"
    straight = workers.config
    workers.config = straight.changed({"redis.url": f"unix://{socket}", "lease.seconds": 8.0})
    async with LosingProxy(socket, straight.redis.url.removeprefix("unix://"), cut=cut, times=times) as proxy:
        async with trainer(workers.config) as us:
            ids = await us.put(24, handler="fault_handlers:Recorded", starts=str(log), sleep=0.1)
            again = await us.put(24, handler="fault_handlers:Flaky")
            p("put")
            workers.line(4)
            (cancelled,) = await us.put(1, samples=1, sleep=30.0)
            print(await us.client.cancel([cancelled]))
            p("cancel")
            await us.turn(8, 60.0)
            p("turn")
            await hand_back(us.client.config)
            p("hb")
            await us.collect(49, 60.0)
            p("coll")
    print(workers.logs()[-6000:])
