#!lua flags=allow-oom
--[[
offsets_settle: mark ranges of offsets as settled and move committed to the first offset that is not.

Idempotent; what lies below committed is harmless; an offset that was never given out by this partition, or lies
beyond the window of the bitmap, refuses the whole call and changes nothing.

Of an archived topic, what was not settled before is told in one entry of a stream, with its id <epoch>-<n>: m who, t ms of
the node's clock, h ranges that were handled, u ranges that the group's filter leaves out, r when they were given, a
offset:failed attempts, x how many told offsets were dropped, the oldest first, because nobody fetched them.

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
  4 told          string  empty: nothing is told; else <entries kept at most>:<a letter per range: h handled, u unmatched,
                          - not to be told>:<last offset:how many ms ago it was given, by commas, rising>
  5 ...           per range: first offset, last offset; then the offsets whose attempts may be forgotten

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
local outcomes_key = KEYS[5]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local range_count = tonumber(ARGV[3])
local told = ARGV[4]

local WINDOW = 1048576
local KEEP_BYTES = 1024
local format = string.format

local next_offset = tonumber(redis.call('HGET', meta_key, 'next') or '0')
if next_offset == 0 then return {'absent'} end
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'top')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
if range_count < 1 or range_count > 500 then return redis.error_reply('ERR offsets_settle: 1 to 500 ranges') end
local kept, words, reads
if told ~= '' then
  kept, words, reads = string.match(told, '^(%d+):([hu-]+):([%d:,]*)$')
  if not words or #words ~= range_count then return redis.error_reply('ERR offsets_settle: a letter per range') end
end
local committed, base, top = tonumber(lock[3]), tonumber(lock[4]), tonumber(lock[5] or '0')
for i = 1, range_count do
  local first, last = tonumber(ARGV[2 * i + 3]), tonumber(ARGV[2 * i + 4])
  if first < 1 or last < first then return redis.error_reply('ERR offsets_settle: bad range') end
  if last >= next_offset then return {'unknown', next_offset} end
  if last >= committed + WINDOW then return {'beyond', committed + WINDOW} end
end

-- What is settled by this call and no earlier one, by its letter: first and last offset in turn.
local fresh = {h = {}, u = {}}
local function tell(line, first, last)
  local n = #line
  if line[n] == first - 1 then line[n] = last else line[n + 1], line[n + 2] = first, last end
end

local bits_kept = top > committed
local function set_bit(at, line)
  if redis.call('SETBIT', acks_key, at, 1) == 0 and line then tell(line, base + at, base + at) end
end
local function tell_clear(from, whole, line)
  local before = redis.call('GETRANGE', acks_key, from / 8, from / 8 + whole - 1)
  if not string.find(before, '%Z') then return tell(line, base + from, base + from + 8 * whole - 1) end
  for i = 1, whole do
    local byte, at = string.byte(before, i) or 0, base + from + 8 * (i - 1)
    for bit = 7, 0, -1 do
      if byte % 2 ^ (bit + 1) < 2 ^ bit then tell(line, at + 7 - bit, at + 7 - bit) end
    end
  end
end
local function set_bits(first, last, line)
  local from, to = first - base, last - base
  while from <= to and from % 8 ~= 0 do
    set_bit(from, line)
    from = from + 1
  end
  local whole = math.floor((to - from + 1) / 8)
  if whole > 0 then
    if line then tell_clear(from, whole, line) end
    redis.call('SETRANGE', acks_key, from / 8, string.rep('\255', whole))
    from = from + 8 * whole
  end
  while from <= to do
    set_bit(from, line)
    from = from + 1
  end
end

for i = 1, range_count do
  local first, last = math.max(tonumber(ARGV[2 * i + 3]), committed), tonumber(ARGV[2 * i + 4])
  local line = words and fresh[string.sub(words, i, i)]
  if first <= last then
    if not bits_kept and first == committed then
      if line then tell(line, first, last) end
      committed = last + 1
      base = committed
    else
      if not bits_kept then
        bits_kept = true
        base = committed
      end
      set_bits(first, last, line)
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
redis.call('HSET', lock_key, 'committed', format('%d', committed), 'base', format('%d', base),
  'top', format('%d', top))
local failed = {}
for i = 5 + 2 * range_count, #ARGV do
  local count = words and string.match(redis.call('HGET', attempts_key, ARGV[i]) or '0', '^%d+') or '0'
  if count ~= '0' then failed[#failed + 1] = ARGV[i] .. ':' .. count end
  redis.call('HDEL', attempts_key, ARGV[i])
end

if #fresh.h > 0 or #fresh.u > 0 then
  local time = redis.call('TIME')
  local entry = {'m', member, 't', format('%d', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))}
  local function add(name, value)
    if value ~= '' then entry[#entry + 1], entry[#entry + 2] = name, value end
  end
  for name, line in pairs(fresh) do
    local ranges = {}
    for i = 1, #line, 2 do ranges[#ranges + 1] = format('%d-%d', line[i], line[i + 1]) end
    add(name, table.concat(ranges, ','))
  end
  add('r', reads)
  add('a', table.concat(failed, ','))
  -- What is dropped is counted in the new entry; an entry that goes leaves its count to the next one.
  local dropped = 0
  while redis.call('XLEN', outcomes_key) >= tonumber(kept) do
    local oldest = redis.call('XRANGE', outcomes_key, '-', '+', 'COUNT', 1)[1]
    local fields = oldest[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'x' then dropped = dropped + tonumber(fields[i + 1]) end
      if fields[i] == 'h' or fields[i] == 'u' then
        for first, last in string.gmatch(fields[i + 1], '(%d+)-(%d+)') do dropped = dropped + last - first + 1 end
      end
    end
    redis.call('XDEL', outcomes_key, oldest[1])
  end
  add('x', dropped > 0 and format('%d', dropped) or '')
  local place = redis.call('HINCRBY', lock_key, 'told', 1)
  redis.call('XADD', outcomes_key, format('%d-%d', epoch, place), unpack(entry))
end
return {'settled', committed}
