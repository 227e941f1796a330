-- Lease up to n rollouts of a stage, lanes served by weight, oldest group first.
-- A: stage, n, lease ms, worker, nonce, inline bytes, free places, newest schema that it reads,
--    then (lane, weight, places that this lane may take)...
-- -> per rollout {id, token, attempt, losses, alone, envelope, payload token, payload or '', waited ms, worked ms, task or '',
--    lane of the place that it takes or ''}
--    Payload and task come along when they are small (inline bytes): it saves the worker a round trip.
-- At INIT those that need a sandbox wait in sets of their own, and only so many are claimed as the worker has places; and no
-- more than the trainer's bound on new rollouts admits.
-- The nonce makes it idempotent: the same request sent again gets the same leases. Worker W has one claim in flight.
-- Error RAISED: the line's schema is above what it reads. (Older versions keep their credits in `credit:STAGE`; raise.lua)
local stage, memo = A[1], key('claim', A[4] .. ':' .. A[1])
local inline = tonumber(A[6])

local function small(name)
  if inline > 0 and redis.call('STRLEN', name) <= inline then return redis.call('GET', name) or '' end
  return ''
end

local function describe(id, token)
  local h = key('r', id)
  local v = redis.call('HMGET', h, 'attempts:' .. stage, 'losses', 'alone', 'env', 'payload', 'waited', 'worked', 'group', 'place', 'lane')
  local payload = (v[5] and v[5] ~= '') and small(key('p', id, v[5])) or ''
  return { id, token, v[1] or '0', v[2] or '0', v[3] or '', v[4], v[5] or '', payload, v[6] or '0', v[7] or '0',
    small(key('t', v[8])), v[9] and v[10] or '' }
end

local out = {}
if redis.call('HGET', memo, 'nonce') == A[5] then
  for id, token in string.gmatch(redis.call('HGET', memo, 'got'), '([^\n]+)\t([^\n]+)\n') do
    if redis.call('HGET', key('r', id), 'token') == token then out[#out + 1] = describe(id, token) end
  end
  return out
end

if overtaken(memo, A[5]) then return out end
local refusal = above(A[8])
if refusal then return refusal end
unlock()
-- No further group may begin in this lane: what is left to claim are rollouts of those that have.
local function only_begun(lane)
  if lane.free > 0 then return end
  lane.left = math.min(lane.left, begun_in(lane.ready))
  lane.waits = begun_in(lane.place)
  lane.quota = math.min(lane.quota, lane.waits)
end

-- A group's deadline counts from its first member's start.
local function start_clock(group)
  local g = redis.call('HMGET', key('g', group), 'life', 'clock', 'closed')
  if not g[1] or g[2] or g[3] then return end
  redis.call('HSET', key('g', group), 'clock', whole(now))
  redis.call('ZADD', key('closing'), whole(now + g[1]), group)
end

local lanes, all = {}, {}
local places = tonumber(A[7])
for i = 9, #A, 3 do
  local lane = { name = A[i], ready = key('ready', stage, A[i]), place = key('place', A[i]), weight = tonumber(A[i + 1]) }
  lane.left = redis.call('ZCARD', lane.ready)
  lane.waits = stage == 'init' and redis.call('ZCARD', lane.place) or 0
  lane.quota = math.min(lane.waits, tonumber(A[i + 2]))
  lane.free = stage == 'init' and lane.left + lane.waits > 0 and admits(A[i]) or math.huge
  lane.bound = lane.free < math.huge
  only_begun(lane)
  all[#all + 1] = lane
  if lane.left > 0 or (lane.quota > 0 and places > 0) then lanes[#lanes + 1] = lane end
end

-- The older of the lane's two heads: one that needs no place, and one that does where there is a place.
local function take_from(lane)
  if lane.quota < 1 or places < 1 then return lane.ready, 'left' end
  if lane.left < 1 then return lane.place, 'quota' end
  local a = redis.call('ZRANGE', lane.ready, 0, 0, 'WITHSCORES')[2]
  local b = redis.call('ZRANGE', lane.place, 0, 0, 'WITHSCORES')[2]
  if a and b and tonumber(b) < tonumber(a) then return lane.place, 'quota' end
  return lane.ready, 'left'
end
-- Smooth weighted round robin; the credit is kept, so that claims of one are as fair as claims of many.
local credits = key('turn', stage)
for _, lane in ipairs(lanes) do lane.credit = tonumber(redis.call('HGET', credits, lane.name) or 0) end
local need, got = tonumber(A[2]), {}
while need > 0 do
  local best, total = nil, 0 -- of the lanes that still wait: else a lane that goes on alone would sink without end
  for _, lane in ipairs(lanes) do
    if lane.left > 0 or (lane.quota > 0 and places > 0) then
      total = total + lane.weight
      lane.credit = lane.credit + lane.weight
      if not best or lane.credit > best.credit then best = lane end
    end
  end
  if not best then break end
  best.credit = best.credit - total
  local set, counter = take_from(best)
  best[counter] = best[counter] - 1
  if counter == 'quota' then places, best.waits = places - 1, best.waits - 1 end
  local id = redis.call('ZPOPMIN', set)[1]
  if id and redis.call('EXISTS', key('r', id)) == 1 then
    local h, token = key('r', id), A[5] .. '-' .. #out
    local waited = now - tonumber(redis.call('HGET', h, 'since'))
    redis.call('HSET', h, 'state', 'leased', 'token', token, 'owner', A[4], 'since', whole(now), 'waited', whole(waited))
    redis.call('HINCRBY', h, 'attempts:' .. stage, 1)
    redis.call('ZADD', key('lease', stage), whole(now + A[3]), id)
    redis.call('SADD', key('own', A[4]), id)
    if stage == 'init' then start_clock(redis.call('HGET', h, 'group')) end
    if stage == 'init' and redis.call('SADD', key('started', best.name), id) == 1 and best.bound then
      best.free = best.free - 1 - begin_group(id, best.name)
      only_begun(best)
    end
    out[#out + 1] = describe(id, token)
    got[#got + 1] = id .. '\t' .. token .. '\n'
    need = need - 1
  end
end
-- Empty: every ring that is still in the doorbell is stale. (While something waits, rings wake the other workers.)
local waiting = 0
for _, lane in ipairs(lanes) do waiting = waiting + lane.left end
if waiting == 0 and stage ~= 'done' then redis.call('DEL', key('bell', stage)) end
if waiting == 0 and stage == 'done' then redis.call('DEL', key('bell', 'done', A[9])) end
local hidden = 0
for _, lane in ipairs(all) do hidden = hidden + lane.waits end
if hidden == 0 and stage == 'init' then redis.call('DEL', key('bell', 'place')) end
for _, lane in ipairs(lanes) do
  if lane.left > 0 then redis.call('HSET', credits, lane.name, lane.credit) else redis.call('HDEL', credits, lane.name) end
end
redis.call('HSET', memo, 'nonce', A[5], 'got', table.concat(got), 'reads', A[8])
redis.call('PEXPIRE', memo, 3600000)
return out
