#!lua flags=allow-oom
--[[
partition_retire: leave of a partition nothing but a tombstone, which answers every publisher "deleted" for ever.

KEYS
  1 meta_key    hash    what becomes the tombstone
  2 ...         the partition's other keys: records, marks, and what its groups have here

ARGV
  none

RETURNS
  {"retired"}     nothing but the tombstone is left
]]
local meta_key = KEYS[1]

for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('HSET', meta_key, 'state', 'deleted')
return {'retired'}
