#!lua flags=allow-oom
--[[
partition_refuse: never let a dropped route change, or an earlier one, seal this partition.

Says so in the partition itself, so that whoever was stopped on its way to seal it can't do it when it wakes up.

KEYS
  1 meta_key    hash    state, change that sealed it, highest change that was dropped

ARGV
  1 change      int     the route change that shall be dropped

RETURNS
  {"refused"}             it can't be sealed by this change any more
  {"sealed"}              this change has sealed it: it must go forward; nothing was changed
  {"absent"}              no such partition on this node
]]
local meta_key = KEYS[1]
local change = ARGV[1]

local meta = redis.call('HMGET', meta_key, 'state', 'sealed_for', 'dropped')
if not meta[1] then return {'absent'} end
if meta[2] == change then return {'sealed'} end
if tonumber(meta[3] or '0') < tonumber(change) then redis.call('HSET', meta_key, 'dropped', change) end
return {'refused'}
