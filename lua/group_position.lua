#!lua flags=no-writes
--[[
group_position: tell how far a group is in one partition, and which is the first message that it has not settled.

Reads only, in one step, and never tells a body.

KEYS
  1 meta_key      hash    state, next and first offset of the partition
  2 log_key       stream  the partition's records
  3 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap, seek; shared: name of the native
                          consumer group, which knows what is settled above committed
  4 acks_key      string  ack bitmap: bit i is offset base + i
  5 attempts_key  hash    offset -> failed attempts and when (see attempt_count)

ARGV
  1 start         int     offset at which the group starts here, where it has committed nothing since its last seek
  2 seek          int     how often the group was sent elsewhere: what was committed before the last time is void

RETURNS
  {"position", now, next, position, settled, owner, epoch [, offset, m, key, failures]}
               now: the node's time in ms; position: the first offset that is not settled; settled: how many offsets
               above it are; then the first message from there on, if any, with its failures ('' for none)
  {"absent"}   no such partition on this node
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local lock_key = KEYS[3]
local acks_key = KEYS[4]
local attempts_key = KEYS[5]
local start = tonumber(ARGV[1])
local seek = tonumber(ARGV[2])

-- include bitmap_lost
-- include native_given

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'seek', 'shared', 'top')
local position, settled = tonumber(lock[3] or '0'), 0
if position == 0 or tonumber(lock[5] or '0') < seek then
  position = math.max(math.min(start, next_offset), tonumber(meta[3] or '1'))
elseif lock[6] then
  -- All that was given and is not pending is settled.
  local given, pending = native_given(log_key, lock[6])
  if given then settled = math.max(0, given + 1 - position - pending) end
elseif tonumber(lock[7] or '0') > position
  and not bitmap_lost(redis.call('STRLEN', acks_key), position, tonumber(lock[4]), tonumber(lock[7])) then
  -- Every bit from base up to committed is set.
  settled = math.max(0, redis.call('BITCOUNT', acks_key) - (position - tonumber(lock[4] or '0')))
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local seen = {'position', now, next_offset, position, settled, lock[1] or '', tonumber(lock[2] or '0')}
if position >= next_offset then return seen end
local entry = redis.call('XRANGE', log_key, string.format('%d-0', position), '+', 'COUNT', 1)[1]
if not entry or string.sub(entry[1], -2) ~= '-0' then return seen end
local offset = string.match(entry[1], '^%d+')
seen[8] = tonumber(offset)
seen[9] = entry[2][2]
seen[10] = entry[2][4]
seen[11] = redis.call('HGET', attempts_key, offset) or ''
return seen
