#!lua
--[[
group_copy: begin a new group where another one is in a partition, at one moment of both.

The new group gets the other's committed, its bitmap and its failed attempts. How attempts were started is left out: no owner
of the new group died. Nothing of the other group is changed.

The lock is written first, without the bitmap, and last with it: a call that ends in its middle leaves a group that begins
at committed.

KEYS
  1 meta_key       hash    state, next and first offset of the partition
  2 log_key        stream  the partition's records
  3 lock_key       hash    of the other group: committed, base of the ack bitmap, seek, top
  4 acks_key       string  of the other group: ack bitmap: bit i is offset base + i
  5 attempts_key   hash    of the other group: offset -> failed attempts and when (see attempt_count)
  6 new_lock_key     hash    of the new group
  7 new_acks_key     string  of the new group
  8 new_attempts_key hash    of the new group

ARGV
  1 epoch         int     the new group's epoch at the partition
  2 start         int     offset at which the other group starts here, where it has committed nothing since its last seek
  3 seek          int     how often the other group was sent elsewhere: what was committed before the last time is void

RETURNS
  {"copied", committed}  done, or done before under this epoch
  {"fenced", epoch}      the new group is here already; nothing was changed
  {"absent"}             no such partition on this node, or its records are gone
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local lock_key = KEYS[3]
local acks_key = KEYS[4]
local attempts_key = KEYS[5]
local new_lock_key = KEYS[6]
local new_acks_key = KEYS[7]
local new_attempts_key = KEYS[8]
local epoch = tonumber(ARGV[1])
local start = tonumber(ARGV[2])
local seek = tonumber(ARGV[3])

-- include bitmap_lost

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
if meta[2] ~= '1' and redis.call('EXISTS', log_key) == 0 then return {'absent'} end
local there = redis.call('HMGET', new_lock_key, 'epoch', 'committed', 'base')
local held = tonumber(there[1] or '0')
-- With its base it is whole.
if held == epoch and there[3] then return {'copied', tonumber(there[2])} end
if held ~= 0 and held ~= epoch then return {'fenced', held} end

local lock = redis.call('HMGET', lock_key, 'committed', 'base', 'seek', 'top')
local committed, base, top = tonumber(lock[1] or '0'), tonumber(lock[2] or '0'), tonumber(lock[4] or '0')
local bits, noted = '', {}
if committed == 0 or tonumber(lock[3] or '0') < seek then
  committed = math.max(math.min(start, tonumber(meta[2])), tonumber(meta[3] or '1'))
else
  noted = redis.call('HGETALL', attempts_key)
  if top > committed then bits = redis.call('GET', acks_key) or '' end
end
if bits == '' or bitmap_lost(#bits, committed, base, top) then
  base, top, bits = committed, 0, ''
end

redis.call('HSET', new_lock_key, 'owner', '', 'epoch', string.format('%d', epoch), 'committed',
  string.format('%d', committed), 'seek', '0', 'top', '0')
for i = 1, #noted, 2 do
  local counted = string.match(noted[i + 1], '^%d+:%d+:%d+')
  if counted and tonumber(noted[i]) >= committed and tonumber(string.match(counted, '^%d+')) > 0 then
    redis.call('HSET', new_attempts_key, noted[i], counted)
  end
end
if bits ~= '' then redis.call('SET', new_acks_key, bits) end
redis.call('HSET', new_lock_key, 'base', string.format('%d', base), 'top', string.format('%d', top))
return {'copied', committed}
