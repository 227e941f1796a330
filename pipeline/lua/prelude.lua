-- Shared head of every script. KEYS[1] is the line's prefix, "{name}": one hash tag, so every key below lives on one primary.
-- The first write of a script must be one that Redis allows at maxmemory (`unlock`): Redis then lets the rest run.
local P, A = KEYS[1], ARGV
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function key(a, b, c)
  local name = P .. ':' .. a
  if b then name = name .. ':' .. b end
  if c then name = name .. ':' .. c end
  return name
end

local function whole(number) return string.format('%.0f', number) end

local function unlock() redis.call('ZREM', key('none'), '') end

-- The line's schema where it is above what a process reads, nil else: that process is given nothing (RAISED).
local function above(reads)
  local schema = tonumber(redis.call('GET', key('schema')) or 0)
  return schema > tonumber(reads) and redis.error_reply('RAISED ' .. whole(schema)) or nil
end

-- Whether a request to lease, "SENDER.NUMBER", is an old one that arrives late: its sender gave it up, sent it again and has
-- asked for more since. What it leased would be in nobody's hands, and its loss counted against the rollout.
local function overtaken(memo, nonce)
  local sender, number = string.match(nonce, '^(%x+)%.(%d+)$')
  local last, reached = string.match(redis.call('HGET', memo, 'nonce') or '', '^(%x+)%.(%d+)$')
  return sender and sender == last and tonumber(number) < tonumber(reached)
end

-- The reference of the file in which a payload or task lies (pipeline/payload_files.py); nil where Redis holds it.
local FILE = '@file1:'
local function held_in_file(name)
  if redis.call('STRLEN', name) > 1024 then return nil end
  local held = redis.call('GET', name)
  if held and string.sub(held, 1, #FILE) == FILE then return held end
end

-- Remove a payload or a task. Its file goes to the trash, for this very removal may be lost with Redis's last second.
local function forget(name)
  local reference = held_in_file(name)
  if reference then redis.call('ZADD', key('trash'), whole(now), reference) end
  redis.call('UNLINK', name)
end

-- A doorbell is only a hint: a list of at most 64 rings. A lost ring costs a waiter its time-out (1 s).
local function ring(bell)
  redis.call('RPUSH', bell, '1')
  redis.call('LTRIM', bell, -64, -1)
end

-- A worker's own doorbell goes with it: nobody else would ever empty it.
local function ring_worker(worker)
  ring(key('bell', 'worker', worker))
  redis.call('EXPIRE', key('bell', 'worker', worker), 3600)
end

-- INIT may begin up to so many rollouts more.
local function ring_init(count)
  for _ = 1, math.min(tonumber(count or 0), 64) do
    ring(key('bell', 'init'))
    ring(key('bell', 'place'))
  end
end

-- How many new rollouts of a lane INIT may begin. The trainer bounds one lane: a group may begin while begun and not acked +
-- popped since its run started < (max_staleness + updates since then + 1) * batch. More would be too stale before the trainer
-- gets to them. With its first rollout the whole group has begun: a trainer that pops groups must not wait for a member that
-- waits for the trainer. What waits at INIT of groups that have begun stands AHEAD of all others. Of a group that is to close
-- before all have ended, those beyond the wanted number are spare: they will not be popped, so they take nobody's place.
local AHEAD = 4e15
local function admits(lane)
  if redis.call('HEXISTS', key('paused'), lane) == 1 then return 0 end
  local v = redis.call('HMGET', key('policy'), 'lane', 'batch', 'max_staleness', 'updates', 'popped')
  if v[1] ~= lane or tonumber(v[2]) < 1 or tonumber(v[3]) < 0 then return math.huge end
  local begun = redis.call('SCARD', key('started', lane)) - tonumber(redis.call('HGET', key('spare'), lane) or 0)
  return math.max(0, (v[3] + v[4] + 1) * v[2] - v[5] - begun)
end

-- So many members of a group are spare no longer: they ended, or the group lets them go on past its close.
local function not_spare(g, lane, count)
  local spare = math.min(tonumber(redis.call('HGET', g, 'spare') or 0), count)
  if spare < 1 then return end
  redis.call('HINCRBY', g, 'spare', -spare)
  redis.call('HINCRBY', key('spare'), lane, -spare)
end

-- Ended without a score, a rollout counts no longer as begun: another one may begin.
local function not_begun(id, lane)
  if redis.call('SREM', key('started', lane), id) == 0 then return end
  not_spare(key('g', redis.call('HGET', key('r', id), 'group')), lane, 1)
  if admits(lane) < math.huge then ring_init(1) end
end

-- Who pauses the policy, nil while it runs. A pause whose lease is over ends here.
local function go_on() redis.call('HDEL', key('policy'), 'paused', 'mode', 'target', 'pause_owner', 'pause_until') end
local function pauser()
  local v = redis.call('HMGET', key('policy'), 'pause_owner', 'pause_until')
  if v[2] and tonumber(v[2]) <= now then
    go_on()
    return nil
  end
  return v[1] or nil
end

-- Staleness counts updates, not the difference of the versions: each version is kept with the number of its update.
local function in_force(version, path)
  redis.call('HSET', key('policy'), 'version', version, 'path', path)
  redis.call('ZADD', key('versions'), redis.call('HINCRBY', key('policy'), 'ordinal', 1), version)
  redis.call('ZREMRANGEBYRANK', key('versions'), 0, -1001)
end

local function remember(id, record)
  if record and record ~= '' then
    redis.call('RPUSH', key('a', id), record)
    redis.call('LTRIM', key('a', id), -40, -1)
  end
end

-- The earliest moment at which this rollout may be over by the caller's wish: its deadline, or its wait in this stage.
local function watch(id, h, waiting)
  local v = redis.call('HMGET', h, 'deadline', 'ttl')
  local deadline, ttl = tonumber(v[1]), tonumber(v[2])
  local due = deadline
  if waiting and ttl and (not due or now + ttl < due) then due = now + ttl end
  if due then redis.call('ZADD', key('due'), whole(due), id) end
end

-- Back at INIT, or at its end, a rollout names no sandbox: the host of the one it had is told, and discards it.
local function leave_sandbox(h)
  local text = redis.call('HGET', h, 'sandbox')
  if not text then return end
  redis.call('HDEL', h, 'sandbox')
  local ok, reference = pcall(cjson.decode, text)
  if ok and type(reference) == 'table' and type(reference.host) == 'string' then ring_worker(reference.host) end
end

-- Where a rollout waits. At INIT, one that needs a sandbox waits in a set of its own: for a host with a free place.
local function waits_in(h, stage, lane)
  if stage == 'init' and redis.call('HGET', h, 'place') then return key('place', lane), key('bell', 'place') end
  return key('ready', stage, lane), key('bell', stage)
end

-- Its turn at INIT: the order of its group, ahead of all groups that have not begun where this one has.
local function turn_at_init(group, order)
  return redis.call('HEXISTS', key('g', group), 'begun') == 1 and whole(order - AHEAD) or order
end

-- How many wait at INIT in this set (see waits_in) whose groups have begun.
local function begun_in(set) return redis.call('ZCOUNT', set, '-inf', whole(-AHEAD / 2)) end

-- A rollout begins at INIT under a bound, and with it its group: all its members count from now on, the spare ones not.
-- -> how many more count now
local function begin_group(id, lane)
  local group, fresh, begun = redis.call('HGET', key('r', id), 'group'), 0, 0
  local g = key('g', group)
  local first = redis.call('HSET', g, 'begun', 1) == 1
  for _, member in ipairs(redis.call('SMEMBERS', key('m', group))) do
    local h = key('r', member)
    local v = redis.call('HMGET', h, 'stage', 'state', 'order')
    if v[1] ~= 'done' then fresh = fresh + redis.call('SADD', key('started', lane), member) end
    begun = begun + redis.call('SISMEMBER', key('started', lane), member)
    if v[1] == 'init' and v[2] == 'ready' then
      local set = waits_in(h, 'init', lane)
      redis.call('ZADD', set, 'XX', whole(v[3] - AHEAD), member)
    end
  end
  local v = redis.call('HMGET', g, 'wanted', 'asked', 'closed')
  local spare = begun - tonumber(v[1] or v[2] or begun)
  if not first or v[3] or spare < 1 then return fresh end
  redis.call('HSET', g, 'spare', spare)
  redis.call('HINCRBY', key('spare'), lane, spare)
  return fresh - spare
end

local function to_ready(id, h, stage)
  if stage == 'init' then leave_sandbox(h) end
  local v = redis.call('HMGET', h, 'lane', 'order', 'group')
  redis.call('HSET', h, 'stage', stage, 'state', 'ready', 'token', '', 'since', whole(now))
  local set, bell = waits_in(h, stage, v[1])
  redis.call('ZADD', set, stage == 'init' and turn_at_init(v[3], v[2]) or v[2], id)
  watch(id, h, true)
  ring(bell)
end

-- Strike a rollout that nobody holds off the set in which it waits.
local function no_longer_waits(id, h, stage, lane)
  redis.call('ZREM', waits_in(h, stage, lane), id)
  redis.call('ZREM', key('delayed', stage), id)
end

local function to_delayed(id, h, stage, delay)
  if stage == 'init' then leave_sandbox(h) end
  redis.call('HSET', h, 'stage', stage, 'state', 'delayed', 'token', '', 'since', whole(now))
  redis.call('ZADD', key('delayed', stage), whole(now + delay), id)
  watch(id, h, true)
end

-- Where a lost or failed attempt goes: a RUN attempt that has touched a sandbox starts again at INIT.
local function back(h, stage)
  if stage == 'run' and redis.call('HGET', h, 'restart') == 'init' then return 'init' end
  return stage
end

-- A member that was popped is back: its group may be popped again, if it has ended or closed.
local function poppable(group, lane, order)
  local g = redis.call('HMGET', key('g', group), 'done', 'samples', 'closed', 'rest')
  if g[1] == g[2] or (g[3] and g[4] == 'later') then redis.call('ZADD', key('groups', lane), order, group) end
end

local function release(id, h, stage, owner)
  redis.call('ZREM', key('lease', stage), id)
  if owner and owner ~= '' then redis.call('SREM', key('own', owner), id) end
end

-- The dead letter: a copy for people, kept for `seconds` (keep.dead_days); nothing depends on it.
local function bury(id, h, stage, seconds)
  local copy = key('letter', id)
  local all = redis.call('HGETALL', h)
  redis.call('DEL', copy)
  for i = 1, #all, 2 do redis.call('HSET', copy, all[i], all[i + 1]) end
  redis.call('HSET', copy, 'died', whole(now))
  local log = redis.call('LRANGE', key('a', id), 0, -1)
  if #log > 0 then redis.call('HSET', copy, 'history', '[' .. table.concat(log, ',') .. ']') end
  redis.call('EXPIRE', copy, seconds)
  redis.call('ZADD', key('dead', stage), whole(now), id)
  redis.call('HSET', key('g', redis.call('HGET', h, 'group')), 'letters', seconds)
end

local close_group

-- The one terminal move: a record in [done], once, whatever the outcome; a group completes with its last member, or closes
-- with as many scored ones as were wanted.
local function finish(id, h, outcome, kind, why, stage, dead_seconds)
  local v = redis.call('HMGET', h, 'lane', 'order', 'group')
  redis.call('ZREM', key('due'), id)
  leave_sandbox(h)
  local group = key('g', v[3])
  -- What ended after its group had closed is for the trainer to take when it likes: nothing new waits for that. It can't be
  -- popped before the first part is acked, which may itself wait for new groups.
  if outcome ~= 'scored' or redis.call('HEXISTS', group, 'closed') == 1 then not_begun(id, v[1]) end
  redis.call('HSET', h, 'outcome', outcome, 'ended', whole(now))
  if kind ~= '' then redis.call('HSET', h, 'kind', kind, 'why', why, 'at', stage) end
  if outcome == 'failed' then bury(id, h, stage, dead_seconds) end
  redis.call('HSET', h, 'stage', 'done', 'state', 'ready', 'token', '', 'since', whole(now))
  redis.call('HINCRBY', key('counts'), outcome, 1)
  redis.call('ZADD', key('ready', 'done', v[1]), v[2], id)
  local done = redis.call('HINCRBY', group, 'done', 1)
  local g = redis.call('HMGET', group, 'samples', 'wanted', 'closed', 'part')
  if g[4] then redis.call('HSET', h, 'late', 1) end
  if done == tonumber(g[1]) then
    redis.call('ZADD', key('groups', v[1]), v[2], v[3])
    redis.call('ZREM', key('closing'), v[3])
  elseif outcome == 'scored' and g[2] and not g[3] and redis.call('HINCRBY', group, 'usable', 1) >= tonumber(g[2]) then
    close_group(v[3], 'usable', 'its group had its ' .. g[2] .. ' scored members without it', dead_seconds)
  end
  ring(key('bell', 'done', v[1]))
end

-- A group waits for no further member. Those that have not ended are cancelled; or they go on, and come later as a group of
-- their own (rest: later).
function close_group(group, closed, why, dead_seconds)
  local g = key('g', group)
  local about = redis.call('HMGET', g, 'lane', 'order', 'rest')
  redis.call('HSET', g, 'closed', closed)
  redis.call('ZREM', key('closing'), group)
  if about[3] == 'later' then
    not_spare(g, about[1], math.huge)
    redis.call('ZADD', key('groups', about[1]), about[2], group)
    ring(key('bell', 'done', about[1]))
    return
  end
  for _, id in ipairs(redis.call('SMEMBERS', key('m', group))) do
    local h = key('r', id)
    local v = redis.call('HMGET', h, 'stage', 'state', 'lane', 'owner')
    if v[1] ~= 'done' and v[2] == 'leased' then
      if redis.call('HSETNX', h, 'cancel', why) == 1 then redis.call('HSET', h, 'cut', 1) end -- the first word counts
      ring_worker(v[4])
    elseif v[1] ~= 'done' then
      no_longer_waits(id, h, v[1], v[3])
      finish(id, h, 'cancelled', 'closed', why, v[1], dead_seconds)
    end
  end
end

-- A cancel that reached a rollout in somebody's hands takes effect at the next verb about it.
local function stop_asked(id, h, stage, dead_seconds)
  local v = redis.call('HMGET', h, 'cancel', 'overdue', 'cut')
  local cancel = v[1]
  if not cancel then return false end
  if v[2] then
    finish(id, h, 'failed', 'limit', 'its deadline passed while it was in ' .. stage, stage, dead_seconds)
  else
    finish(id, h, 'cancelled', v[3] and 'closed' or 'cancelled', cancel, stage, dead_seconds)
  end
  return true
end
