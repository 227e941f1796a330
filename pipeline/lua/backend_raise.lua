-- Be the one who changes a server's weights: two at once would mix them.
-- A: id, who, ms (0: it is done, or given up), 'keep' (only where it is mine still)
-- -> 1 (mine, for so long from now), or 0 (another's; with 'keep': it has run out)
unlock()
local name = key('raise', A[1])
local holder = redis.call('GET', name)
if holder and holder ~= A[2] or A[4] == 'keep' and not holder then return 0 end
if A[3] == '0' then redis.call('DEL', name) else redis.call('SET', name, A[2], 'PX', A[3]) end
return 1
