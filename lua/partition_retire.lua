#!lua flags=allow-oom
--[[
partition_retire: leave of a partition nothing but a tombstone, which answers every publisher "deleted" for ever.

What became of its messages stays besides, as long as no archiver has fetched it: then call it again. The tombstone comes
first, so a call that ends in its middle leaves no more than keys that the next one removes.

KEYS
  1 meta_key    hash    what becomes the tombstone
  2 ...         the partition's other keys: records, marks, and what its groups have here; last the streams of outcomes

ARGV
  1 streams     int     how many streams of outcomes are to stay while something is in them

RETURNS
  {"retired"}     nothing but the tombstone is left
  {"unfetched", n}  so many streams of outcomes besides, of which not all is fetched
]]
local meta_key = KEYS[1]
local streams = tonumber(ARGV[1])

redis.call('HSET', meta_key, 'state', 'deleted')
local unfetched = 0
for i = 2, #KEYS do
  if i > #KEYS - streams and redis.call('XLEN', KEYS[i]) > 0 then
    unfetched = unfetched + 1
  else
    redis.call('UNLINK', KEYS[i])
  end
end
redis.call('HDEL', meta_key, 'topic', 'lp_from', 'lp_to', 'next', 'first', 'change', 'sealed_for', 'seal', 'lost', 'lost_marks')
if unfetched > 0 then return {'unfetched', unfetched} end
return {'retired'}
