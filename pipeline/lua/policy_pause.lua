-- Stop the policy's calls, for new weights or for a person. A second pause of the same owner changes what it says.
-- A: owner, life ms (0: until it is lifted), why, mode, version on its way or ''
-- -> {'OK', its number} | {'BUSY', owner} | {'OLD', version in force}: versions only rise
unlock()
local policy, owner = key('policy'), pauser()
if owner and owner ~= A[1] then return { 'BUSY', owner } end
local version = redis.call('HGET', policy, 'version')
if A[5] ~= '' and version and tonumber(A[5]) <= tonumber(version) then return { 'OLD', version } end
if not owner then redis.call('HINCRBY', policy, 'pauses', 1) end
redis.call('HSET', policy, 'paused', A[3], 'mode', A[4], 'target', A[5], 'pause_owner', A[1])
if A[2] == '0' then redis.call('HDEL', policy, 'pause_until') else redis.call('HSET', policy, 'pause_until', whole(now + A[2])) end
return { 'OK', redis.call('HGET', policy, 'pauses') }
