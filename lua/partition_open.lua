#!lua flags=allow-oom
--[[
partition_open: load marks into a successor that waits for them, and open it.

Called several times where there are many marks: only the last call opens. Loading is idempotent and lowers none, and
nobody else writes to a partition that is importing.

KEYS
  1 meta_key    hash    state, the change it is made for
  2 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 change      int     the route change
  2 last        int     1: open it
  3 ...         per mark: field, seq

RETURNS
  {"loaded"}                 more is to come
  {"open"}                   open now, or before by this change: then nothing was changed
  {"conflict", state}        made for another change, or closed since; nothing was changed
  {"absent"}                 no such partition on this node
]]
local meta_key = KEYS[1]
local marks_key = KEYS[2]
local change = ARGV[1]
local last = ARGV[2] == '1'

local meta = redis.call('HMGET', meta_key, 'state', 'change')
local state = meta[1]
if not state then return {'absent'} end
if meta[2] ~= change then return {'conflict', state} end
if state == 'open' then return {'open'} end
if state ~= 'importing' then return {'conflict', state} end
for i = 3, #ARGV, 2 do
  if tonumber(redis.call('HGET', marks_key, ARGV[i]) or '-1') < tonumber(ARGV[i + 1]) then
    redis.call('HSET', marks_key, ARGV[i], ARGV[i + 1])
  end
end
if not last then return {'loaded'} end
redis.call('HSET', meta_key, 'state', 'open')
return {'open'}
