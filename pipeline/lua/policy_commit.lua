-- New weights are in force: one more update, and the pause for them ends. A: owner of the pause, version, path or ''
-- -> OK | LOST (the pause is not this owner's any more) | OLD (versions only rise)
unlock()
local policy, owner = key('policy'), pauser()
local version = tonumber(redis.call('HGET', policy, 'version') or '')
if owner ~= A[1] then return (not owner and version == tonumber(A[2])) and 'OK' or 'LOST' end -- OK: sent a second time
if version and tonumber(A[2]) <= version then return 'OLD' end
in_force(A[2], A[3])
redis.call('HINCRBY', policy, 'updates', 1)
go_on()
ring_init(redis.call('HGET', policy, 'batch'))
return 'OK'
