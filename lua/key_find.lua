#!lua flags=no-writes
--[[
key_find: count the messages of one key that a group has not settled in a few offsets of a partition, and tell the
first of them.

Reads only, and never tells a body.

KEYS
  1 log_key       stream  the partition's records
  2 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap, seek; shared: name of the native
                          consumer group
  3 acks_key      string  ack bitmap: bit i is offset base + i
  4 attempts_key  hash    offset -> failed attempts and when (see attempt_count)

ARGV
  1 key           string  the messages' key
  2 first         int     look from this offset on, which is not below the group's position
  3 count         int     at so many offsets, 1 to 1000
  4 seek          int     how often the group was sent elsewhere: what was settled before the last time is void

RETURNS
  {"found", count, offset, m, failures}   how many, and the first one with its failures ('' for none)
  {"found", 0}
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local acks_key = KEYS[3]
local attempts_key = KEYS[4]
local key = ARGV[1]
local first = tonumber(ARGV[2])
local count = tonumber(ARGV[3])
local seek = tonumber(ARGV[4])

-- include bitmap_lost
-- include native_given

if count < 1 or count > 1000 then return redis.error_reply('ERR key_find: 1 to 1000 offsets') end
local lock = redis.call('HMGET', lock_key, 'committed', 'base', 'seek', 'shared', 'top')
local committed, base, top = 0, 0, tonumber(lock[5] or '0')
if tonumber(lock[3] or '0') >= seek then committed, base = tonumber(lock[1] or '0'), tonumber(lock[2] or '0') end
local bits_kept = top > committed and not bitmap_lost(redis.call('STRLEN', acks_key), committed, base, top)
local given = lock[4] and native_given(log_key, lock[4]) or 0
local function is_settled(offset)
  if lock[4] and offset >= committed then
    local id = string.format('%d-0', offset)
    return offset <= given and #redis.call('XPENDING', log_key, lock[4], id, id, 1) == 0
  end
  return offset < committed or (committed > 0 and bits_kept and redis.call('GETBIT', acks_key, offset - base) == 1)
end
local entries = redis.call('XRANGE', log_key, string.format('%d-0', first), string.format('%d-0', first + count - 1))
local found, head = 0, nil
for _, entry in ipairs(entries) do
  if entry[2][4] == key and string.sub(entry[1], -2) == '-0' then
    local offset = tonumber(string.match(entry[1], '^%d+'))
    if not is_settled(offset) then
      found = found + 1
      head = head or {offset, entry[2][2]}
    end
  end
end
if not head then return {'found', 0} end
return {'found', found, head[1], head[2], redis.call('HGET', attempts_key, string.format('%d', head[1])) or ''}
