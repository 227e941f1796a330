-- Read only: what is wrong with these rollouts, at this moment. Their sets and their hashes are looked at in one step, so
-- that traffic can't make a sound line look broken.
-- A: how many lanes, the lanes, then ids... -> {id, what is wrong}... (nothing for a sound rollout)
local lanes = {}
for i = 2, 1 + A[1] do lanes[#lanes + 1] = A[i] end
local out = {}

local function places(id)
  local found = {}
  for _, lane in ipairs(lanes) do
    if redis.call('ZSCORE', key('place', lane), id) then found[#found + 1] = 'place:' .. lane end
  end
  for _, stage in ipairs({ 'init', 'run', 'eval', 'done' }) do
    for _, lane in ipairs(lanes) do
      if redis.call('ZSCORE', key('ready', stage, lane), id) then found[#found + 1] = 'ready:' .. stage .. ':' .. lane end
    end
    if redis.call('ZSCORE', key('lease', stage), id) then found[#found + 1] = 'lease:' .. stage end
    if redis.call('ZSCORE', key('delayed', stage), id) then found[#found + 1] = 'delayed:' .. stage end
  end
  return found
end

local function started(id)
  for _, lane in ipairs(lanes) do
    if redis.call('SISMEMBER', key('started', lane), id) == 1 then return lane end
  end
end

local function wanted(stage, state, lane, place)
  if state == 'ready' and stage == 'init' and place then return 'place:' .. lane end
  if state == 'ready' then return 'ready:' .. stage .. ':' .. lane end
  if state == 'leased' then return 'lease:' .. stage end
  return state .. ':' .. stage
end

for i = 2 + A[1], #A do
  local id, h = A[i], key('r', A[i])
  local function wrong(what)
    out[#out + 1] = id
    out[#out + 1] = what
  end
  local v = redis.call('HMGET', h, 'stage', 'state', 'lane', 'owner', 'token', 'payload', 'group', 'place')
  local found, begun = places(id), started(id)
  if redis.call('EXISTS', h) == 0 then
    if #found > 0 then wrong('stands in ' .. table.concat(found, ', ') .. ' but has no hash') end
    if redis.call('EXISTS', key('a', id)) == 1 then wrong('has a list of attempts but no hash') end
    if begun then wrong('counts as started in lane ' .. begun .. ' but has no hash: it takes the place of a new one') end
  elseif not (v[1] and v[2] and v[3] and v[7]) then
    wrong('has a hash without stage, state, lane or group')
  else
    local place = wanted(v[1], v[2], v[3], v[8])
    if begun and begun ~= v[3] then wrong('is of lane ' .. v[3] .. ' and counts as started in lane ' .. begun) end
    if not begun and v[1] ~= 'done' and redis.call('HEXISTS', key('g', v[7]), 'begun') == 1 then
      wrong('belongs to group ' .. v[7] .. ', which has begun, and does not count as started')
    end
    if #found ~= 1 or found[1] ~= place then
      wrong('should stand in ' .. place .. ' alone and stands in ' .. (#found > 0 and table.concat(found, ', ') or 'no set'))
    end
    if v[2] == 'leased' then
      if not v[5] or v[5] == '' then wrong('is leased without a token') end
      if redis.call('SISMEMBER', key('own', v[4] or ''), id) == 0 then wrong('is leased by ' .. (v[4] or '?') .. ', whose own set lacks it') end
    end
    if v[6] and v[6] ~= '' then
      local ttl = redis.call('TTL', key('p', id, v[6]))
      if ttl == -2 then wrong('names a payload that is not there (p:' .. id .. ':' .. v[6] .. ')') end
      if ttl >= 0 then wrong('names a payload that will expire in ' .. ttl .. ' s') end
    end
    if redis.call('EXISTS', key('g', v[7])) == 0 then wrong('belongs to group ' .. v[7] .. ', which has no hash') end
    if redis.call('SISMEMBER', key('m', v[7]), id) == 0 then wrong('is no member of its group ' .. v[7]) end
  end
end
return out
