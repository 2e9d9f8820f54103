#!lua flags=allow-oom
--[[
pop_settle: take a receiver's word on messages that it was given: handled, given back, or to be withheld for longer.

Each message is named by the batch that it was given with; where another batch has it since, or none, it is left alone
and told. What is settled already is settled: that is no error, whoever says it.

Of an archived topic, what is acknowledged is told in one entry of a stream, in the form of offsets_settle.

Messages of a packed batch need no more than their bits and the batch's own end, once all of it is settled. Where some is given
back or extended by itself, the batch is unpacked first (see pop_receive). What is extended as a whole stays packed.

What is acknowledged is told first, expired messages are counted before that; then the lock's count of packed batches is void until it is settled and has left its batch
or its queue: where the call ends in between, all that is not below committed is given again (see pop_receive).

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 lock_key      hash    owner ("pop"), epoch, committed, base, top, examined, packed, queued; wake_count,
                          parking; class_waits: 1: a class of keys waits for one that is out
  3 acks_key      string  ack bitmap: bit i is offset base + i; absent while nothing above committed is settled
  4 attempts_key  hash    offset -> times given out and when (see pop_receive)
  5 pops_key      hash    offset -> <batch that it is out with, 0: given back>:<ms when it is visible>:<queue>
  6 queues_key    zset    <length of queue><queue><offset, 16 digits> of what is in no packed batch
  7 due_key       zset    queue -> ms when it may be given out, inf: out with a packed batch; \254<batch> -> ms
  8 wake_key      stream  one entry, <wake_count>-0: a queue got free, or will be sooner
  9 outcomes_key  stream  what became of offsets, until an archiver has fetched it
  10 log_key      stream  the partition's records
  11 batches_key  hash    packed batches, their attempts and their count (see pop_receive)

ARGV
  1 epoch         int     the epoch under which they were given
  2 action        string  "ack"; "park": the same, and its key may be parked; "nack": it failed, give it back, with all
                          behind it in its queue; "return": the same, but it did not fail; "extend"
  3 ms            int     nack, return: the queue rests so long; extend: it is withheld for so long from now on
  4 count         int     1 to 500 runs of messages of one batch, with 1 to 500 messages in all
  5 encoded_outcome string  empty: nothing is told; else <entries kept at most>:<h handled, u unmatched,
                          e expired, which is counted too>:<who settles>
  6 ...           per run: batch, first offset, last offset

RETURNS
  {"settled", committed, {place, ...}}    done, but for those told by their place in the call, from 1, each message of a
                                          run by itself: another batch has them, or none
  {"fenced", epoch}                       another epoch is in force; nothing was changed
  {"unknown", next}                       an offset at or above next; nothing was changed
  {"absent"}                              no such partition on this node
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local acks_key = KEYS[3]
local attempts_key = KEYS[4]
local pops_key = KEYS[5]
local queues_key = KEYS[6]
local due_key = KEYS[7]
local wake_key = KEYS[8]
local outcomes_key = KEYS[9]
local log_key = KEYS[10]
local batches_key = KEYS[11]
local epoch = tonumber(ARGV[1])
local action = ARGV[2]
local ms = tonumber(ARGV[3])
local count = tonumber(ARGV[4])
local encoded_outcome = ARGV[5]

local format = string.format
local settles = action == 'ack' or action == 'park'

-- include committed_advance
-- include bits_set
-- include pop_width
-- include batch_unpack
-- include pop_incomplete
-- include outcome_append
-- include expired_count
-- include range_add

local meta = redis.call('HMGET', meta_key, 'state', 'next')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'top', 'examined', 'packed', 'queued', 'class_waits')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'pop' or held ~= epoch then return {'fenced', held} end
if not settles and action ~= 'nack' and action ~= 'return' and action ~= 'extend' then return redis.error_reply('ERR pop_settle: no such word') end
local committed, base, top = tonumber(lock[3]), tonumber(lock[4]), tonumber(lock[5] or '0')
local packed, queued = tonumber(lock[7] or '0'), tonumber(lock[8] or '0')
local bits_kept = top > committed
local class_waits = lock[9] == '1'
local batch_of, offsets, named = {}, {}, 0
if count < 1 or count > WIDTH then return redis.error_reply('ERR pop_settle: 1 to 500 messages') end
for i = 1, count do
  local number, first, last = ARGV[3 * i + 3], tonumber(ARGV[3 * i + 4]), tonumber(ARGV[3 * i + 5])
  if first < 1 or last < first then return redis.error_reply('ERR pop_settle: bad offset') end
  if last >= next_offset then return {'unknown', next_offset} end
  if named + last - first >= WIDTH then return redis.error_reply('ERR pop_settle: 1 to 500 messages') end
  for offset = first, last do
    named = named + 1
    batch_of[named], offsets[named] = number, offset
  end
end
if pop_incomplete(log_key, acks_key, queues_key, due_key, batches_key, committed, base, top, tonumber(lock[6] or '0'), packed, queued) then
  local all = {}
  for i = 1, named do all[i] = i end
  return {'settled', committed, all}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local is_settled = settled_in(acks_key, committed, base, top, offsets)

-- Packed batches that are named: by number what is left of each, offset -> place of its queue.
local batches = {}
local function open_batch(number)
  local packed_batch = redis.call('HGET', batches_key, number)
  if not packed_batch or string.find(number, '%D') then return false end
  local attempt, given_ms, all, queues, places = unpack(cmsgpack.unpack(packed_batch))
  local settled, left, left_count = settled_in(acks_key, committed, base, top, all), {}, 0
  for i, offset in ipairs(all) do
    if not settled(offset) then
      left[offset] = places[i] or 1
      left_count = left_count + 1
    end
  end
  return {attempt = attempt, given_ms = given_ms, queues = queues, left = left, left_count = left_count, packed = packed_batch,
    closed = {}}
end
for i = 1, named do
  local number = batch_of[i]
  if batches[number] == nil then batches[number] = open_batch(number) end
end

local wake = false
if not settles then
  -- How many messages that are left of each packed batch are named.
  local counts, seen = {}, {}
  for i = 1, named do
    local number, offset = batch_of[i], offsets[i]
    local one = batches[number]
    if one and one.left[offset] and not seen[offset] then
      seen[offset] = true
      counts[number] = (counts[number] or 0) + 1
    end
  end
  local unpacked = false
  for number, in_call in pairs(counts) do
    local before = tonumber(redis.call('ZSCORE', due_key, batch_name(number)) or '0')
    if action == 'extend' and in_call == batches[number].left_count then
      redis.call('ZADD', due_key, format('%d', now + ms), batch_name(number))
      wake = wake or now + ms < before
    else
      batch_unpack(number, batches[number].packed, committed, base, top, before)
      batches[number], unpacked = false, true
    end
  end
  if unpacked then
    packed, queued = tonumber(redis.call('HGET', batches_key, '=')), redis.call('ZCARD', queues_key)
    redis.call('HSET', lock_key, 'packed', format('%d', packed), 'queued', format('%d', queued))
  end
end

-- Those that are out by themselves, with the batch that each is out with.
local alone, out = {}, {}
for i = 1, named do
  if not batches[batch_of[i]] then alone[#alone + 1] = format('%d', offsets[i]) end
end
if #alone > 0 then
  for i, noted in ipairs(redis.call('HMGET', pops_key, unpack(alone))) do out[alone[i]] = noted end
end
-- Ours: offset and queue each, sorted; the same message twice is one.
local ours, ours_alone, stale, taken, sorted = {}, {}, {}, {}, true
for i = 1, named do
  local number, offset, queue = batch_of[i], offsets[i], nil
  local one = batches[number]
  if one then
    queue = one.queues[one.left[offset]]
  else
    local of, _, its = string.match(out[format('%d', offset)] or '', '^(%d+):(%d+):(.*)$')
    if of == number and of ~= '0' then queue = its end
  end
  if queue then
    if not taken[offset] then
      sorted = sorted and (#ours == 0 or ours[#ours][1] < offset)
      ours[#ours + 1] = {offset, queue, one}
      if not one then ours_alone[#ours_alone + 1] = {offset, queue} end
    end
    taken[offset] = true
  elseif not settles or not is_settled(offset) then
    stale[#stale + 1] = i
  end
end
local function by_offset(a, b) return a[1] < b[1] end
if not sorted then
  table.sort(ours, by_offset)
  table.sort(ours_alone, by_offset)
end
local ranges = {}
for _, one in ipairs(ours) do range_add(ranges, one[1], one[1]) end

local function place(queue, offset) return queue_prefix(queue) .. format('%016d', offset) end
local attempts_kept = settles and #ours > 0 and redis.call('EXISTS', attempts_key) == 1
local names = {}
if attempts_kept or #ours_alone > 0 then
  for i, one in ipairs(ours) do names[i] = format('%d', one[1]) end
end

local function append_settled()
  local kept, letter, who = string.match(encoded_outcome, '^(%d+):([hue]):(.*)$')
  if letter == 'e' then expired_count(lock_key, ranges) end
  if kept == '0' then return end
  local times = attempts_kept and redis.call('HMGET', attempts_key, unpack(names)) or {}
  local told, reads, failed = {}, {}, {}
  for i = 1, #ranges, 2 do told[#told + 1] = format('%d-%d', ranges[i], ranges[i + 1]) end
  for i, one in ipairs(letter == 'h' and ours or {}) do
    local begun, _, given = attempt_parts(times[i])
    if one[3] then begun, given = begun + 1, one[3].given_ms end
    -- Messages of one batch were given at one time: the last one stands for those before it.
    local ago = given and format('%d', math.max(0, now - tonumber(given))) or ''
    if #reads > 0 and reads[#reads][2] == ago then
      reads[#reads][1] = one[1]
    else
      reads[#reads + 1] = {one[1], ago}
    end
    if begun > 1 then failed[#failed + 1] = format('%d:%d', one[1], begun - 1) end
  end
  for i, read in ipairs(reads) do reads[i] = format('%d:%s', read[1], read[2]) end
  local entry = {'m', who, 't', format('%d', now), letter, table.concat(told, ',')}
  if #reads > 0 then entry[#entry + 1], entry[#entry + 2] = 'r', table.concat(reads, ',') end
  if #failed > 0 then entry[#entry + 1], entry[#entry + 2] = 'a', table.concat(failed, ',') end
  outcome_append(outcomes_key, lock_key, epoch, tonumber(kept), entry)
end

local function settle_ranges()
  for i = 1, #ranges, 2 do
    local first, last = math.max(ranges[i], committed), ranges[i + 1]
    if last < first then
      -- Settled by a call that ended before it left its queue.
    elseif not bits_kept and first == committed then
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
      top = math.max(top, last + 1)
      if first == committed then committed = last + 1 end
    end
  end
  committed = committed_advance(lock_key, acks_key, committed, base, top, bits_kept)
end

-- Queues that ours stand in: what each was before may have changed.
local touched = {}
for _, one in ipairs(ours_alone) do touched[one[2]] = true end
local function leave_batches()
  local freed = {}
  for i = 1, named do
    local one, offset = batches[batch_of[i]], offsets[i]
    local its = one and one.left[offset]
    if its then
      one.left[offset] = nil
      one.left_count = one.left_count - 1
      one.closed[its] = true
    end
  end
  for number, one in pairs(batches) do
    if one then
      local closed = one.closed
      if one.left_count == 0 then
        packed = packed - 1
        redis.call('HINCRBY', batches_key, '=', -1)
        redis.call('HDEL', batches_key, number, one.attempt)
        freed[#freed + 1] = batch_name(number)
      else
        for _, its in pairs(one.left) do closed[its] = nil end
      end
      for its in pairs(closed) do
        local queue = one.queues[its]
        -- Of a queue of its own, nobody waits for more than what is appended; of its class, maybe.
        wake = wake or queue == '' or class_waits
        if queued > 0 then touched[queue] = true else freed[#freed + 1] = queue end
      end
    end
  end
  if #freed > 0 then redis.call('ZREM', due_key, unpack(freed)) end
end

if #ours > 0 and settles then
  if encoded_outcome ~= '' then append_settled() end
  -- Until the lock tells the counts again, what this call leaves is void.
  redis.call('HSET', lock_key, 'packed', '-1')
  if attempts_kept then redis.call('HDEL', attempts_key, unpack(names)) end
  -- Before its key's next message may be given out.
  if action == 'park' then redis.call('HINCRBY', lock_key, 'parking', 1) end
  settle_ranges()
  leave_batches()
  if #ours_alone > 0 then
    local removed, left = {}, {}
    for i, one in ipairs(ours_alone) do removed[i], left[i] = place(one[2], one[1]), format('%d', one[1]) end
    redis.call('ZREM', queues_key, unpack(removed))
    redis.call('HDEL', pops_key, unpack(left))
    queued = redis.call('ZCARD', queues_key)
  end
elseif action == 'nack' or action == 'return' then
  local back = {}
  for _, one in ipairs(ours_alone) do
    -- The first one of a queue decides for all behind it: they must not go on before it.
    local offset, queue = one[1], one[2]
    if not back[queue] then
      back[queue] = true
      local name = format('%d', offset)
      if action == 'nack' then
        redis.call('HSET', attempts_key, name, attempt_failed(redis.call('HGET', attempts_key, name)))
      end
      redis.call('HSET', pops_key, name, format('0:%d:', now + ms) .. queue)
      local behind = redis.call('ZRANGEBYLEX', queues_key, '[' .. place(queue, offset + 1),
        '(' .. queue_prefix(queue) .. ':', 'LIMIT', 0, WIDTH)
      local freed = {}
      for i, member in ipairs(behind) do freed[i] = format('%d', tonumber(string.sub(member, -16))) end
      if #freed > 0 then redis.call('HDEL', pops_key, unpack(freed)) end
    end
  end
elseif action == 'extend' then
  for _, one in ipairs(ours_alone) do
    local name = format('%d', one[1])
    local of = string.match(redis.call('HGET', pops_key, name), '^%d+')
    redis.call('HSET', pops_key, name, format('%s:%d:', of, now + ms) .. one[2])
  end
end

-- When a queue may go on: now where nothing at its front is out, else when the last of what is out is visible.
for queue in pairs(touched) do
  local members = redis.call('ZRANGEBYLEX', queues_key, '[' .. queue_prefix(queue) .. '0', '(' .. queue_prefix(queue) .. ':', 'LIMIT', 0, WIDTH)
  if #members == 0 then
    redis.call('ZREM', due_key, queue)
    wake = wake or queue == '' or class_waits
  else
    local before = tonumber(redis.call('ZSCORE', due_key, queue) or '0')
    local fronts, due = {}, now
    for i, member in ipairs(members) do fronts[i] = format('%d', tonumber(string.sub(member, -16))) end
    for _, front in ipairs(redis.call('HMGET', pops_key, unpack(fronts))) do
      if not front then break end
      due = math.max(due, tonumber(string.match(front, '^%d+:(%d+):')))
    end
    redis.call('ZADD', due_key, format('%d', due), queue)
    -- What is given back is out no more, however long it waits.
    wake = wake or due < before or due <= now or (class_waits and (action == 'nack' or action == 'return'))
  end
end
if #ours > 0 and settles then
  redis.call('HSET', lock_key, 'packed', format('%d', packed), 'queued', format('%d', queued))
end
if wake or (#ours > 0 and meta[1] == 'sealed' and committed >= next_offset) then
  local wake_count = redis.call('HINCRBY', lock_key, 'wake_count', 1)
  local woke = redis.pcall('XADD', wake_key, 'MAXLEN', 1, format('%d-0', wake_count), 'w', '1')
  if type(woke) == 'table' and woke.err then
    -- The lock was removed, and began to count anew.
    redis.call('DEL', wake_key)
    redis.call('XADD', wake_key, 'MAXLEN', 1, format('%d-0', wake_count), 'w', '1')
  end
end
return {'settled', committed, stale}
