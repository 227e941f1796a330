-- Groups of a lane may begin again. A: lane
unlock()
redis.call('HDEL', key('paused'), A[1])
ring_init(64)
return 'OK'
