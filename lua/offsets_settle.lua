#!lua flags=allow-oom
--[[
offsets_settle: mark ranges of offsets as settled and move committed to the first offset that is not.

Idempotent; what lies below committed is harmless; an offset that was never given out by this partition, or lies
beyond the window of the bitmap, refuses the whole call and changes nothing.

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap
  3 acks_key      string  ack bitmap: bit i is offset base + i; absent while nothing above committed is settled
  4 attempts_key  hash    offset -> failed attempts and when (see attempt_count)

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 range_count   int     1 to 500
  4 ...           per range: first offset, last offset; then the offsets whose attempts may be forgotten

RETURNS
  {"settled", committed}    done
  {"fenced", epoch}         another epoch is in force; nothing was changed
  {"unknown", next}         an offset at or above next; nothing was changed
  {"beyond", limit}         an offset at or above the end of the window; nothing was changed
  {"absent"}                no such partition on this node
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local acks_key = KEYS[3]
local attempts_key = KEYS[4]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local range_count = tonumber(ARGV[3])

local WINDOW = 1048576
local KEEP_BYTES = 1024

local next_offset = tonumber(redis.call('HGET', meta_key, 'next') or '0')
if next_offset == 0 then return {'absent'} end
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'top')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
if range_count < 1 or range_count > 500 then return redis.error_reply('ERR offsets_settle: 1 to 500 ranges') end
local committed, base, top = tonumber(lock[3]), tonumber(lock[4]), tonumber(lock[5] or '0')
for i = 1, range_count do
  local first, last = tonumber(ARGV[2 * i + 2]), tonumber(ARGV[2 * i + 3])
  if first < 1 or last < first then return redis.error_reply('ERR offsets_settle: bad range') end
  if last >= next_offset then return {'unknown', next_offset} end
  if last >= committed + WINDOW then return {'beyond', committed + WINDOW} end
end

local bits_kept = top > committed
local function set_bits(first, last)
  local from, to = first - base, last - base
  while from <= to and from % 8 ~= 0 do
    redis.call('SETBIT', acks_key, from, 1)
    from = from + 1
  end
  local whole = math.floor((to - from + 1) / 8)
  if whole > 0 then
    redis.call('SETRANGE', acks_key, from / 8, string.rep('\255', whole))
    from = from + 8 * whole
  end
  while from <= to do
    redis.call('SETBIT', acks_key, from, 1)
    from = from + 1
  end
end

for i = 1, range_count do
  local first, last = math.max(tonumber(ARGV[2 * i + 2]), committed), tonumber(ARGV[2 * i + 3])
  if first <= last then
    if not bits_kept and first == committed then
      committed = last + 1
      base = committed
    else
      if not bits_kept then
        bits_kept = true
        base = committed
      end
      set_bits(first, last)
      top = math.max(top, last + 1)
      if first == committed then committed = last + 1 end
    end
  end
end
if bits_kept then
  -- Every bit below committed is set, so the first clear one from its byte on is the new committed.
  local clear = redis.call('BITPOS', acks_key, 0, math.floor((committed - base) / 8))
  if clear >= 0 then committed = base + clear end
  local spent = math.floor((committed - base) / 8)
  if committed >= top then
    redis.call('DEL', acks_key)
    base = committed
    top = 0
  elseif spent > KEEP_BYTES then
    redis.call('SET', acks_key, redis.call('GETRANGE', acks_key, spent, -1))
    base = base + 8 * spent
  end
end
redis.call('HSET', lock_key, 'committed', string.format('%d', committed), 'base', string.format('%d', base),
  'top', string.format('%d', top))
for i = 4 + 2 * range_count, #ARGV do redis.call('HDEL', attempts_key, ARGV[i]) end
return {'settled', committed}
