-- Raise the line's schema, never lower it. A: number -> the number that it has now
-- Versions that know schema 1 alone hear of no raise. Their claim reads `credit:STAGE` as a hash before it gives anything out:
-- it is a string from here on, so that claim ends in an error and gives nothing.
unlock()
local schema = tonumber(redis.call('GET', key('schema')) or 0)
if tonumber(A[1]) > schema then
  schema = tonumber(A[1])
  redis.call('SET', key('schema'), A[1])
end
if schema > 1 then
  for _, stage in ipairs({ 'init', 'run', 'eval', 'done' }) do redis.call('SET', key('credit', stage), 'raised') end
end
return schema
