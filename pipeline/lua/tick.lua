-- Upkeep, by every worker about once a second: expire leases, promote what was delayed, end what is over its time.
-- A: lease ms, how many at most, max attempts, max losses, letters' life s, the worker that says so ('': a consumer),
--    the line's schema as it knows it (a server that came back empty is told)
-- -> {expired, failed, promoted, blind (1: leases were left alone), over, the line's schema}
-- If nobody ticked for half a lease (Redis was away, frozen or loading), living owners could not beat either: for one lease
-- more no lease expires, so that they beat first.
-- Of a thousand workers' ticks a second, ten look at everything (SELDOM): the others only say that their worker lives.
local SELDOM = 100 -- ms
unlock()
local schema = redis.call('GET', key('schema'))
if not schema then
  schema = A[7]
  redis.call('SET', key('schema'), schema)
end
local lease, limit = tonumber(A[1]), tonumber(A[2])
local last = tonumber(redis.call('GET', key('tick')) or 0)
local blind = tonumber(redis.call('GET', key('blind')) or 0) > now
if A[6] ~= '' then
  redis.call('ZADD', key('beats'), 'XX', whole(now), A[6]) -- it lives
  if now >= last and now - last < SELDOM then return { 0, 0, 0, blind and 1 or 0, 0, tonumber(schema) } end
end
if last == 0 then last = now end -- the line's first tick
if now - last > lease / 2 then redis.call('SET', key('blind'), whole(now + lease)) end
redis.call('SET', key('tick'), whole(now))
blind = tonumber(redis.call('GET', key('blind')) or 0) > now
local expired, failed, promoted, over = 0, 0, 0, 0

-- How many rollouts the owner held when it died: alone, its death is an attempt; in company, a loss that nobody chose.
local function company(owner)
  local died = tonumber(redis.call('GET', key('died', owner)) or 0)
  if died == 0 then
    died = redis.call('SCARD', key('own', owner))
    redis.call('SET', key('died', owner), died, 'EX', 3600)
  end
  return died
end

local function lose(id, h, stage)
  local v = redis.call('HMGET', h, 'owner', 'alone', 'attempts:' .. stage, 'losses', 'since')
  local attempts, losses, owner = tonumber(v[3] or 1), tonumber(v[4] or 0), v[1] or ''
  local shared = company(owner) > 1
  release(id, h, stage, owner)
  if shared then
    losses = redis.call('HINCRBY', h, 'losses', 1)
    attempts = redis.call('HINCRBY', h, 'attempts:' .. stage, -1)
    if redis.call('HINCRBY', h, 'deaths', 1) >= 2 then redis.call('HSET', h, 'alone', '1') end
  end
  local why = 'worker ' .. owner .. ' was not heard of for ' .. math.floor(lease / 1000 + 0.5) .. ' s'
  remember(id, cjson.encode({
    stage = stage, worker = owner, outcome = 'lost', kind = 'worker', error = why,
    started = tonumber(v[5] or now) / 1000, seconds = (now - tonumber(v[5] or now)) / 1000,
  }))
  expired = expired + 1
  if stop_asked(id, h, stage, A[5]) then return end
  if attempts >= tonumber(A[3]) and not shared then
    failed = failed + 1
    finish(id, h, 'failed', 'worker', why .. '; it ran this rollout alone (attempt ' .. attempts .. ' of ' .. A[3] .. ')', stage, A[5])
  elseif losses >= tonumber(A[4]) then
    failed = failed + 1
    finish(id, h, 'failed', 'worker', why .. ' (loss ' .. losses .. ' of ' .. A[4] .. ')', stage, A[5])
  else
    to_ready(id, h, back(h, stage))
  end
end

local function unpopped(id, h)
  local v = redis.call('HMGET', h, 'lane', 'order', 'group', 'owner')
  release(id, h, 'done', v[4])
  redis.call('HSET', h, 'state', 'ready', 'token', '', 'since', whole(now))
  redis.call('ZADD', key('ready', 'done', v[1]), v[2], id)
  poppable(v[3], v[1], v[2])
  ring(key('bell', 'done', v[1]))
  expired = expired + 1
end

if not blind then
  for _, stage in ipairs({ 'init', 'run', 'eval', 'done' }) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('lease', stage), '-inf', now, 'LIMIT', 0, limit)) do
      local h = key('r', id)
      if redis.call('EXISTS', h) == 0 then redis.call('ZREM', key('lease', stage), id)
      elseif stage == 'done' then unpopped(id, h)
      else lose(id, h, stage) end
    end
  end
end
for _, stage in ipairs({ 'init', 'run', 'eval' }) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('delayed', stage), '-inf', now, 'LIMIT', 0, limit)) do
    redis.call('ZREM', key('delayed', stage), id)
    if redis.call('EXISTS', key('r', id)) == 1 then
      to_ready(id, key('r', id), stage)
      promoted = promoted + 1
    end
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('due'), '-inf', now, 'LIMIT', 0, limit)) do
  local h = key('r', id)
  local v = redis.call('HMGET', h, 'state', 'stage', 'deadline', 'ttl', 'since', 'lane', 'owner')
  redis.call('ZREM', key('due'), id)
  if v[1] and v[2] ~= 'done' then
    local late = v[3] and tonumber(v[3]) <= now
    local waited = v[4] and tonumber(v[5]) + tonumber(v[4]) <= now
    if v[1] == 'leased' then
      if late then
        if redis.call('HSETNX', h, 'cancel', 'its deadline passed') == 1 then redis.call('HSET', h, 'overdue', '1') end
        ring_worker(v[7])
      elseif v[3] then redis.call('ZADD', key('due'), v[3], id) end
    elseif late or waited then
      no_longer_waits(id, h, v[2], v[6])
      local why = late and 'its deadline passed while it waited in ' .. v[2]
        or 'it waited ' .. math.floor((now - v[5]) / 1000) .. ' s in ' .. v[2] .. ', longer than its queue_ttl'
      finish(id, h, 'failed', 'limit', why, v[2], A[5])
      over = over + 1
    else watch(id, h, true) end
  end
end
for _, group in ipairs(redis.call('ZRANGEBYSCORE', key('closing'), '-inf', now, 'LIMIT', 0, limit)) do
  close_group(group, 'deadline', 'its group closed at its deadline', A[5])
end
local old = redis.call('ZRANGEBYSCORE', key('beats'), '-inf', now - 3600000, 'LIMIT', 0, limit)
for _, worker in ipairs(old) do
  redis.call('ZREM', key('beats'), worker)
  redis.call('HDEL', key('workers'), worker)
end
for _, stage in ipairs({ 'init', 'run', 'eval' }) do
  redis.call('ZREMRANGEBYSCORE', key('dead', stage), '-inf', now - A[5] * 1000)
end
return { expired, failed, promoted, blind and 1 or 0, over, tonumber(schema) }
