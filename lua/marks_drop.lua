#!lua flags=allow-oom
--[[
marks_drop: remove marks of sources that are closed.

A partition that has records has marks: without any, log_append takes them for lost. So where none would be left, one stays
that says nothing, of source 0.

KEYS
  1 meta_key    hash    state, range of LPs
  2 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 first       string  <source>:<lp>
  2 ...         string  more of them, 2000 in all at most

RETURNS
  {"dropped", count}   so many of them were there
]]
local meta_key = KEYS[1]
local marks_key = KEYS[2]
local first = ARGV[1]

if first == '' or #ARGV > 2000 then return redis.error_reply('ERR marks_drop: 1 to 2000 marks') end
local there = 0
for _, mark in ipairs(redis.call('HMGET', marks_key, unpack(ARGV))) do
  if mark then there = there + 1 end
end
if there == 0 then return {'dropped', 0} end
if there == redis.call('HLEN', marks_key) then
  redis.call('HSET', marks_key, '0:' .. (redis.call('HGET', meta_key, 'lp_from') or '0'), '0')
end
return {'dropped', redis.call('HDEL', marks_key, unpack(ARGV))}
