-- Take payload files out of the trash, for removal. A: ms for which they must have lain there, how many at most
-- -> their references
unlock()
local due = redis.call('ZRANGEBYSCORE', key('trash'), '-inf', whole(now - A[1]), 'LIMIT', 0, A[2])
if #due > 0 then redis.call('ZREM', key('trash'), unpack(due)) end
return due
