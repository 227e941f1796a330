-- A task's samples, all or none (a sample that is known, or ended and acked, counts as done already): the group, its task payload, one hash and one ready entry a sample.
-- A: group, task payload or its file's reference, priority, lane, max_length, first stage, ttl ms or '', deadline ms or '', samples of the group,
--    handler, scored members with which the group closes or '', samples without the extra ones, ms from its first start to
--    its close or '', rest ('later' or ''), why it closed before this line lost it or '' (what it has not here was popped),
--    then (id, envelope)...
-- -> {'OK', written} | {'FULL', length}; samples that are known (or were acked within the tombstone's life) are skipped.
local group, fresh = key('g', A[1]), {}

local function closes_as_asked()
  for name, value in pairs({ wanted = A[11], life = A[13], rest = A[14] }) do
    if value ~= '' then redis.call('HSET', group, name, value) else redis.call('HDEL', group, name) end
  end
end

-- More samples of a group that has not closed: it closes as it is asked to now, and none of its members is spare.
local function close_anew()
  closes_as_asked()
  not_spare(group, A[4], math.huge)
  if A[13] == '' then redis.call('ZREM', key('closing'), A[1]) end
  local usable = 0
  for _, id in ipairs(redis.call('SMEMBERS', key('m', A[1]))) do
    if redis.call('HGET', key('r', id), 'outcome') == 'scored' then usable = usable + 1 end
  end
  redis.call('HSET', group, 'usable', usable)
end

for i = 16, #A, 2 do
  if redis.call('EXISTS', key('r', A[i])) == 0 and redis.call('EXISTS', key('gone', A[i])) == 0 then fresh[#fresh + 1] = i end
end
if #fresh == 0 then return { 'OK', 0 } end
local live = tonumber(redis.call('HGET', key('counts'), 'live') or 0)
local max = tonumber(A[5])
if max > 0 and live + #fresh > max then return { 'FULL', live } end
if redis.call('EXISTS', group) == 0 then
  redis.call('HSET', group, 'samples', A[9], 'lane', A[4], 'done', tonumber(A[9]) - #fresh, 'left', 0, 'order',
    whole(redis.call('INCR', key('seq')) - tonumber(A[3]) * 1e9), 'asked', A[12])
  closes_as_asked()
  if A[15] ~= '' then redis.call('HSET', group, 'closed', A[15], 'part', 1) end
  redis.call('SET', key('t', A[1]), A[2])
end
if tonumber(A[9]) > tonumber(redis.call('HGET', group, 'samples')) then -- the same task again, with more samples
  redis.call('HSET', group, 'samples', A[9], 'asked', A[12])
  local g = redis.call('HMGET', group, 'lane', 'closed', 'rest')
  if not g[2] then close_anew() end
  if not (g[2] and g[3]) then redis.call('ZREM', key('groups', g[1]), A[1]) end -- unless its first part may be popped
end
if redis.call('EXISTS', key('t', A[1])) == 0 then redis.call('SET', key('t', A[1]), A[2]) end
local order = redis.call('HGET', group, 'order')
local begun = redis.call('HEXISTS', group, 'begun') -- further members of a group that has begun do not wait for weights
local place = redis.call('SISMEMBER', key('places'), A[10]) == 1
for _, i in ipairs(fresh) do
  local id, h = A[i], key('r', A[i])
  redis.call('HSET', h, 'env', A[i + 1], 'group', A[1], 'lane', A[4], 'order', order, 'entered', whole(now), 'losses', 0,
    'worked', 0)
  if A[7] ~= '' then redis.call('HSET', h, 'ttl', A[7]) end
  if A[8] ~= '' then redis.call('HSET', h, 'deadline', A[8]) end
  if place then redis.call('HSET', h, 'place', '1') end
  redis.call('SADD', key('m', A[1]), id)
  if begun == 1 then redis.call('SADD', key('started', A[4]), id) end
  to_ready(id, h, A[6])
end
redis.call('HINCRBY', group, 'left', #fresh)
redis.call('HINCRBY', key('counts'), 'enqueued', #fresh)
redis.call('HINCRBY', key('counts'), 'live', #fresh)
return { 'OK', #fresh }
