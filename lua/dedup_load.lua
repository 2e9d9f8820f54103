#!lua flags=allow-oom
--[[
dedup_load: hand ids of messages over to a successor that is not open yet.

Idempotent: an id that is there stays as it is. Ages are durations, so that no two nodes' clocks are compared.

KEYS
  1 meta_key    hash    state, the change it is made for
  2 ids_key     hash    id -> place
  3 ages_key    zset    id -> ms when it came

ARGV
  1 change      int     the route change
  2 window_ms   int     how long they are kept after this
  3 ...         per id: the id, its place, how long ago it came in ms

RETURNS
  {"loaded"}               they are there
  {"conflict", state}      made for another change, or open by now; nothing was changed
  {"absent"}               no such partition on this node
]]
local meta_key = KEYS[1]
local ids_key = KEYS[2]
local ages_key = KEYS[3]
local change = ARGV[1]
local window_ms = tonumber(ARGV[2])

local meta = redis.call('HMGET', meta_key, 'state', 'change')
if not meta[1] then return {'absent'} end
if meta[1] ~= 'importing' or meta[2] ~= change then return {'conflict', meta[1]} end
local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
for i = 3, #ARGV, 3 do
  -- The age first: an id without one would be known for ever.
  redis.call('ZADD', ages_key, 'NX', string.format('%.0f', now_ms - tonumber(ARGV[i + 2])), ARGV[i])
  redis.call('HSETNX', ids_key, ARGV[i], ARGV[i + 1])
end
if redis.call('PTTL', ages_key) < window_ms then
  redis.call('PEXPIRE', ids_key, window_ms)
  redis.call('PEXPIRE', ages_key, window_ms)
end
return {'loaded'}
