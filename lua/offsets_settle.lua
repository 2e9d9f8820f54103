#!lua flags=allow-oom
--[[
offsets_settle: mark ranges of offsets as settled and move committed to the first offset that is not.

Idempotent; what lies below committed is harmless; an offset that was never given out by this partition, or lies
beyond the window of the bitmap, refuses the whole call and changes nothing.

Of an archived topic, what was not settled before is told in one entry of a stream, with its id <epoch>-<n>: m who, t ms of
the node's clock, h ranges that were handled, u ranges that the group's filter leaves out, e ranges whose time to live ended, r when they were given, a
offset:failed attempts, x how many told offsets were dropped, the oldest first, because nobody fetched them.

It is told first, then the bits are set, then the lock says so: where the call ends in between, the same call again does
the rest, and may tell it twice. Bits that the lock does not tell of are void, and a bitmap that is not the one that the
lock tells of gives the lock up: the next owner starts at committed.

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap
  3 acks_key      string  ack bitmap: bit i is offset base + i; absent while nothing above committed is settled
  4 attempts_key  hash    offset -> failed attempts and when (see attempt_count)
  5 outcomes_key  stream  what became of offsets, until an archiver has fetched it

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 range_count   int     1 to 500
  4 encoded_outcome string  empty: nothing is told; else <entries kept at most>:<a letter per range: h handled, u unmatched,
                          e expired, - not to be told>:<last offset:how many ms ago it was given, by commas, rising>
  5 ...           per range: first offset, last offset; then the offsets whose attempts may be forgotten

RETURNS
  {"settled", committed}    done
  {"fenced", epoch}         another epoch is in force, or the bitmap is lost; nothing was settled
  {"unknown", next}         an offset at or above next; nothing was changed
  {"beyond", limit}         an offset at or above the end of the window; nothing was changed
  {"absent"}                no such partition on this node
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local acks_key = KEYS[3]
local attempts_key = KEYS[4]
local outcomes_key = KEYS[5]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local range_count = tonumber(ARGV[3])
local encoded_outcome = ARGV[4]

local NEAR_BYTES = 4096
local format, byte_of, floor, max, min = string.format, string.byte, math.floor, math.max, math.min

-- include bitmap_lost
-- include committed_advance
-- include bits_set
-- include settled_append
-- include expired_count
-- include ack_window
-- include range_add

local next_offset = tonumber(redis.call('HGET', meta_key, 'next') or '0')
if next_offset == 0 then return {'absent'} end
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'top')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
if range_count < 1 or range_count > 500 then return redis.error_reply('ERR offsets_settle: 1 to 500 ranges') end
local kept, letters, reads
if encoded_outcome ~= '' then
  kept, letters, reads = string.match(encoded_outcome, '^(%d+):([hue-]+):([%d:,]*)$')
  if not letters or #letters ~= range_count then return redis.error_reply('ERR offsets_settle: a letter per range') end
end
local committed, base, top = tonumber(lock[3]), tonumber(lock[4]), tonumber(lock[5] or '0')
local firsts, lasts = {}, {}
for i = 1, range_count do
  local first, last = tonumber(ARGV[2 * i + 3]), tonumber(ARGV[2 * i + 4])
  firsts[i], lasts[i] = first, last
  if first < 1 or last < first then return redis.error_reply('ERR offsets_settle: bad range') end
  if last >= next_offset then return {'unknown', next_offset} end
  if last >= committed + WINDOW then return {'beyond', committed + WINDOW} end
end

local bits_kept = top > committed
if bits_kept and bitmap_lost(redis.call('STRLEN', acks_key), committed, base, top) then
  redis.call('HSET', lock_key, 'owner', '', 'base', format('%d', committed), 'top', '0')
  return {'fenced', held}
end

-- What is settled by this call and no earlier one, by its letter: first and last offset in turn.
local fresh = {h = {}, u = {}, e = {}}
-- The part of the bitmap where the ranges lie, in one read; unless they lie far apart: then each one's is read.
local near, near_from = nil, 0
if letters and bits_kept then
  local low, high = next_offset, committed
  for i = 1, range_count do low, high = min(low, firsts[i]), max(high, lasts[i]) end
  near_from = floor((max(low, committed) - base) / 8)
  local near_to = floor((high - base) / 8)
  if near_to - near_from < NEAR_BYTES then near = redis.call('GETRANGE', acks_key, near_from, near_to) end
end
local function add_clear(line, first, last)
  local from, to = first - base, last - base
  local low, high = floor(from / 8), floor(to / 8)
  local bytes, begin = near, near_from
  if not near then
    bytes, begin = redis.call('GETRANGE', acks_key, low, high), low
  end
  if high > low and not string.find(string.sub(bytes, low - begin + 1, high - begin + 1), '%Z') then
    return range_add(line, first, last)
  end
  for at = low, high do
    local byte = byte_of(bytes, at - begin + 1) or 0
    for bit = max(from, 8 * at), min(to, 8 * at + 7) do
      if byte == 0 or byte % 2 ^ (8 - bit % 8) < 2 ^ (7 - bit % 8) then range_add(line, base + bit, base + bit) end
    end
  end
end
local function add_new(i, at, line, first, last)
  -- But for what earlier ranges of the call have.
  for j = at, i - 1 do
    local from, to = firsts[j], lasts[j]
    if from <= last and to >= first then
      if first < from then add_new(i, j + 1, line, first, from - 1) end
      if to >= last then return end
      first = to + 1
    end
  end
  if bits_kept then add_clear(line, first, last) else range_add(line, first, last) end
end
local highest = 0
for i = 1, letters and range_count or 0 do
  local first, last = max(firsts[i], committed), lasts[i]
  local line = fresh[string.sub(letters, i, i)]
  -- Ranges come in order: then none has anything of an earlier one.
  if line and first <= last then add_new(i, first > highest and i or 1, line, first, last) end
  highest = max(highest, last)
end
if #fresh.h + #fresh.u + #fresh.e > 0 then
  local failed = {}
  for i = 5 + 2 * range_count, #ARGV do
    local count = string.match(redis.call('HGET', attempts_key, ARGV[i]) or '0', '^%d+')
    if count ~= '0' then failed[#failed + 1] = ARGV[i] .. ':' .. count end
  end
  settled_append(outcomes_key, lock_key, epoch, tonumber(kept), member, fresh, reads, failed)
end
expired_count(lock_key, fresh.e)

for i = 1, range_count do
  local first, last = max(firsts[i], committed), lasts[i]
  if first <= last then
    if not bits_kept and first == committed then
      committed = last + 1
      base = committed
    else
      if not bits_kept then
        -- Bits of before are void: the lock tells of none.
        redis.call('DEL', acks_key)
        bits_kept = true
        base = committed
      end
      bits_set(acks_key, base, first, last)
      top = max(top, last + 1)
      if first == committed then committed = last + 1 end
    end
  end
end
committed = committed_advance(lock_key, acks_key, committed, base, top, bits_kept)
for i = 5 + 2 * range_count, #ARGV do redis.call('HDEL', attempts_key, ARGV[i]) end
return {'settled', committed}
