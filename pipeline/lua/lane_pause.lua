-- Nothing new of a lane begins at INIT. What has, goes on, by whole groups: a trainer may still pop them. A: lane, why (JSON)
unlock()
for _, id in ipairs(redis.call('SMEMBERS', key('started', A[1]))) do
  if redis.call('HEXISTS', key('g', redis.call('HGET', key('r', id), 'group')), 'begun') == 0 then begin_group(id, A[1]) end
end
redis.call('HSET', key('paused'), A[1], A[2])
return 'OK'
