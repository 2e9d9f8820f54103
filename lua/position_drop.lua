#!lua flags=allow-oom
--[[
position_drop: move a group's position past records that the limits of their topic no longer keep, and count those that
it has not settled.

An owner is refused from then on, and takes the partition again where the position is then. Receivers and members of a
shared group go on; what they have in hand of the records counts as settled. Of an archived topic, the outcome is told.

A packed batch that has some of it is unpacked first: its messages withhold their queues until they are answered or visible,
and pop_receive removes them.

The owner goes first, then the outcome and the count are told, then the position moves: where the call ends in between, the
same call again does the rest, and may tell and count twice.

KEYS
  1 meta_key      hash    state, next and first offset of the partition
  2 log_key       stream  the partition's records, with the native consumer groups of shared groups
  3 lock_key      hash    owner, epoch, committed, base, top, seek; packed, queued (see pop_receive); dropped: how many unsettled messages went so, ever
  4 acks_key      string  ack bitmap: bit i is offset base + i
  5 attempts_key  hash    offset -> failed attempts and when
  6 pops_key      hash    ordered pop: what is out by itself
  7 queues_key    zset    ordered pop: what was looked at and is not settled
  8 due_key       zset    ordered pop, shared: when what may be given
  9 batches_key   hash    ordered pop: packed batches, their attempts and their count
  10 outcomes_key stream  what became of offsets, until an archiver has fetched it

ARGV
  1 bound         int     the first offset that is kept
  2 before        string  facts of the record before it: where they are others, nothing is changed
  3 start         int     offset at which the group starts here, where it has committed nothing since its last seek
  4 seek          int     how often the group was sent elsewhere: what was committed before the last time is void
  5 kept          int     entries of outcomes that are kept at most; 0: no outcome is told

RETURNS
  {"position", position, dropped, count, next, state}   count: unsettled messages that this call dropped; dropped: ever;
                                                        next, state: of the partition
  {"changed"}                                           the record before the bound is another one
  {"absent"}                                            no such partition on this node
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local lock_key = KEYS[3]
local acks_key = KEYS[4]
local attempts_key = KEYS[5]
local pops_key = KEYS[6]
local queues_key = KEYS[7]
local due_key = KEYS[8]
local batches_key = KEYS[9]
local outcomes_key = KEYS[10]
local bound = tonumber(ARGV[1])
local before = ARGV[2]
local start = tonumber(ARGV[3])
local seek = tonumber(ARGV[4])
local kept = tonumber(ARGV[5])

local RANGES = 500
local PENDING = 1000
local UNPACKED = 100
local format, max, min = string.format, math.max, math.min

-- include bitmap_lost
-- include bits_set
-- include committed_advance
-- include native_given
-- include settled_append
-- include range_add
-- include pop_width
-- include batch_unpack
-- include pop_incomplete

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'top', 'seek', 'shared', 'dropped', 'examined',
  'packed', 'queued')
local committed, base, top = tonumber(lock[3] or '0'), tonumber(lock[4] or '0'), tonumber(lock[5] or '0')
local begun = committed > 0 and tonumber(lock[6] or '0') >= seek
local position = begun and committed or max(min(start, next_offset), tonumber(meta[3] or '1'))
local function answer(count)
  local dropped = tonumber(redis.call('HGET', lock_key, 'dropped') or '0')
  return {'position', position, dropped, count, next_offset, meta[1]}
end
if position >= bound then return answer(0) end
local last = format('%d-0', bound - 1)
local entry = redis.call('XRANGE', log_key, last, last)[1]
if (entry and entry[2][2] or '') ~= before then return {'changed'} end

-- What is dropped, as ranges, of bounded number: the next call goes on behind them.
local fresh, acked = {h = {}, u = {}, d = {}}, {}
local line = fresh.d
local shared = begun and lock[7]
local given = shared and native_given(log_key, shared)
local bits_kept = begun and not shared and top > committed
  and not bitmap_lost(redis.call('STRLEN', acks_key), committed, base, top)
local function add_clear(first, last, upto)
  local low = math.floor((first - base) / 8)
  local bits = redis.call('GETRANGE', acks_key, low, math.floor((last - base) / 8))
  local offset = first
  while offset <= last and #line < 2 * RANGES do
    local at = offset - base
    local byte = string.byte(bits, math.floor(at / 8) - low + 1) or 0
    local step = at % 8 == 0 and (byte == 0 or byte == 255) and min(8, last - offset + 1) or 1
    if byte % 2 ^ (8 - at % 8) < 2 ^ (7 - at % 8) then range_add(line, offset, offset + step - 1) end
    offset = offset + step
  end
  if offset <= last then return offset end
  if offset < upto then range_add(line, offset, upto - 1) end
  return upto
end
-- An armed node keeps what receivers have without the owner.
local pop = begun and not shared and lock[9]
local packed, examined = tonumber(lock[10] or '0'), tonumber(lock[9] or '0')
local incomplete = pop and pop_incomplete(log_key, acks_key, queues_key, due_key, batches_key, committed, base, top, examined,
  packed, tonumber(lock[11] or '0'))
if pop and meta[1] == 'sealed' and (incomplete or packed > 0 or redis.call('HLEN', pops_key) > 0) then
  bound = min(bound, next_offset - 1)
  if position >= bound then return answer(0) end
end
-- Packed batches that have some of what is dropped, by the first of it each; of bounded number too. Queues that wait by class are
-- below 0.
local function affected_batches()
  local found = {}
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', due_key, '0', '(inf')) do
    if string.byte(name) == 254 then
      local number, lowest = string.sub(name, 2), nil
      local packed_batch = redis.call('HGET', batches_key, number)
      local offsets = cmsgpack.unpack(packed_batch)[3]
      local is_settled = settled_in(acks_key, committed, base, top, offsets)
      for _, offset in ipairs(offsets) do
        if offset < bound and not is_settled(offset) then lowest = min(lowest or offset, offset) end
      end
      if lowest then found[#found + 1] = {lowest, number, packed_batch} end
    end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  return found
end
if incomplete then
  -- Receivers begin at the new position, once nothing is out any more.
  redis.call('HSET', lock_key, 'packed', '-1')
elseif pop and packed > 0 then
  local affected = affected_batches()
  if affected[UNPACKED + 1] then bound = affected[UNPACKED + 1][1] end
  for i = 1, min(#affected, UNPACKED) do
    local number = affected[i][2]
    local until_ms = tonumber(redis.call('ZSCORE', due_key, batch_name(number)))
    batch_unpack(number, affected[i][3], committed, base, top, until_ms)
  end
  if #affected > 0 then
    redis.call('HSET', lock_key, 'packed', redis.call('HGET', batches_key, '='),
      'queued', format('%d', redis.call('ZCARD', queues_key)))
  end
end
if given then
  local pending = redis.call('XPENDING', log_key, shared, '-', last, PENDING)
  for _, one in ipairs(pending) do
    local offset = tonumber(string.match(one[1], '^%d+'))
    acked[#acked + 1] = one[1]
    if string.sub(one[1], -2) == '-0' then range_add(line, offset, offset) end
  end
  if #pending == PENDING then
    bound = tonumber(string.match(acked[PENDING], '^%d+')) + 1
  elseif given + 1 < bound then
    range_add(line, max(position, given + 1), bound - 1)
  end
elseif bits_kept then
  bound = add_clear(position, min(bound, top) - 1, bound)
else
  range_add(line, position, bound - 1)
end
local count = 0
for i = 1, #line, 2 do count = count + line[i + 1] - line[i] + 1 end

if lock[1] and lock[1] ~= '' and lock[1] ~= 'pop' and lock[1] ~= 'shared' then redis.call('HSET', lock_key, 'owner', '') end
if kept > 0 and count > 0 then
  settled_append(outcomes_key, lock_key, tonumber(lock[2] or '0'), kept, 'retention', fresh, '', {})
end
if count > 0 then redis.call('HINCRBY', lock_key, 'dropped', format('%d', count)) end
local at_bound = format('%d', bound)
if not begun then
  if lock[7] then redis.pcall('XGROUP', 'DESTROY', log_key, lock[7]) end
  -- Without a lock, it was removed: receivers may have some of what is kept, and are waited for (see pop_receive).
  local packed_now = committed == 0 and redis.call('EXISTS', batches_key) == 1 and '-1' or '0'
  redis.call('DEL', acks_key, attempts_key, pops_key, queues_key, due_key, batches_key)
  redis.call('HSET', lock_key, 'committed', at_bound, 'base', at_bound, 'top', '0', 'examined', at_bound,
    'seek', format('%d', seek), 'packed', packed_now, 'queued', '0')
elseif shared then
  if #acked > 0 then
    local offsets = {}
    for i, id in ipairs(acked) do offsets[i] = string.match(id, '^%d+') end
    redis.call('XACK', log_key, shared, unpack(acked))
    redis.call('HDEL', attempts_key, unpack(offsets))
    redis.call('ZREM', due_key, unpack(offsets))
  end
  if given and given + 1 < bound and #acked < PENDING then
    redis.call('XGROUP', 'SETID', log_key, shared, format('%d-0', bound - 1))
  end
  redis.call('HSET', lock_key, 'committed', at_bound, 'base', at_bound)
else
  if pop then redis.call('HSET', lock_key, 'examined', format('%d', max(bound, examined))) end
  if bits_kept and top > bound then
    -- Every bit below committed is set.
    for i = 1, #line, 2 do bits_set(acks_key, base, line[i], line[i + 1]) end
    committed_advance(lock_key, acks_key, bound, base, top, true)
  else
    committed_advance(lock_key, acks_key, bound, bound, 0, false)
    redis.call('DEL', acks_key)
  end
end
position = bound
return answer(count)
