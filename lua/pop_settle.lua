#!lua flags=allow-oom
--[[
pop_settle: take a receiver's word on messages that it was given: handled, given back, or to be withheld for longer.

Each message is named by the batch that it was given with; where another batch has it since, or none, it is left alone
and told. What is settled already is settled: that is no error, whoever says it.

Of an archived topic, what is acknowledged is told in one entry of a stream, in the form of offsets_settle.

What is acknowledged is told first, then settled, and leaves its queue last: where the call ends in between, it is given
again, or the same call again does the rest. While what stands in queues is not whole, nothing is taken (see pop_receive).

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 lock_key      hash    owner ("pop"), epoch, committed, base, top, examined; wake_count
  3 acks_key      string  ack bitmap: bit i is offset base + i; absent while nothing above committed is settled
  4 attempts_key  hash    offset -> times given out and when (see pop_receive)
  5 pops_key      hash    offset -> <batch that it is out with, 0: given back>:<ms when it is visible>:<queue>
  6 queues_key    zset    <length of queue><queue><offset, 16 digits> of what was looked at and is not settled
  7 due_key       zset    queue -> ms when it may be given out
  8 wake_key      stream  one entry, <wake_count>-0: a queue got free, or will be sooner
  9 outcomes_key  stream  what became of offsets, until an archiver has fetched it
  10 log_key      stream  the partition's records

ARGV
  1 epoch         int     the epoch under which they were given
  2 action        string  "ack"; "nack": give it back, with all behind it in its queue; "extend"
  3 ms            int     nack: the queue rests so long; extend: it is withheld for so long from now on
  4 count         int     1 to 500 messages
  5 encoded_outcome string  empty: nothing is told; else <entries kept at most>:<who settles>
  6 ...           per message: batch, offset

RETURNS
  {"settled", committed, {place, ...}}    done, but for those told by their place in the call, from 1: another batch has
                                          them, or none
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
local epoch = tonumber(ARGV[1])
local action = ARGV[2]
local ms = tonumber(ARGV[3])
local count = tonumber(ARGV[4])
local encoded_outcome = ARGV[5]

local format = string.format

-- include committed_advance
-- include pop_width
-- include pop_incomplete
-- include outcome_append

local meta = redis.call('HMGET', meta_key, 'state', 'next')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'base', 'top', 'examined')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'pop' or held ~= epoch then return {'fenced', held} end
if count < 1 or count > WIDTH then return redis.error_reply('ERR pop_settle: 1 to 500 messages') end
if action ~= 'ack' and action ~= 'nack' and action ~= 'extend' then return redis.error_reply('ERR pop_settle: no such word') end
local committed, base, top = tonumber(lock[3]), tonumber(lock[4]), tonumber(lock[5] or '0')
local bits_kept = top > committed
local offsets = {}
for i = 1, count do
  local offset = tonumber(ARGV[2 * i + 5])
  if offset < 1 then return redis.error_reply('ERR pop_settle: bad offset') end
  if offset >= next_offset then return {'unknown', next_offset} end
  offsets[i] = ARGV[2 * i + 5]
end
if pop_incomplete(log_key, acks_key, queues_key, due_key, committed, base, top, tonumber(lock[6] or '0')) then
  local all = {}
  for i = 1, count do all[i] = i end
  return {'settled', committed, all}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local out = redis.call('HMGET', pops_key, unpack(offsets))

-- Ours: offset and queue each; the same message twice is one.
local ours, stale, taken = {}, {}, {}
for i = 1, count do
  local offset = tonumber(offsets[i])
  local of, _, queue = string.match(out[i] or '', '^(%d+):(%d+):(.*)$')
  if of == ARGV[2 * i + 4] and of ~= '0' then
    if not taken[offset] then ours[#ours + 1] = {offset, queue} end
    taken[offset] = true
  else
    local settled = offset < committed or (bits_kept and redis.call('GETBIT', acks_key, offset - base) == 1)
    if action ~= 'ack' or not settled then stale[#stale + 1] = i end
  end
end
table.sort(ours, function(a, b) return a[1] < b[1] end)

local queues, changes, removed = {}, {}, {}
local function place(queue, offset) return format('%03d', #queue) .. queue .. format('%016d', offset) end
for i, one in ipairs(ours) do
  local offset, queue = one[1], one[2]
  queues[queue] = true
  changes[i] = format('%d', offset)
  removed[i] = place(queue, offset)
end

local function append_settled()
  local kept, who = string.match(encoded_outcome, '^(%d+):(.*)$')
  local times = redis.call('HMGET', attempts_key, unpack(changes))
  local ranges, reads, failed, from = {}, {}, {}, nil
  for i, one in ipairs(ours) do
    local begun, given = string.match(times[i] or '', '^(%d+):%d+:(%d+)')
    from = from or one[1]
    local after = ours[i + 1]
    if not after or after[1] ~= one[1] + 1 then
      ranges[#ranges + 1] = format('%d-%d', from, one[1])
      from = nil
    end
    -- Messages of one batch were given at one time: the last one stands for those before it.
    local ago = given and format('%d', math.max(0, now - tonumber(given))) or ''
    if #reads > 0 and reads[#reads][2] == ago then
      reads[#reads][1] = one[1]
    else
      reads[#reads + 1] = {one[1], ago}
    end
    if begun and tonumber(begun) > 1 then failed[#failed + 1] = format('%d:%d', one[1], tonumber(begun) - 1) end
  end
  for i, read in ipairs(reads) do reads[i] = format('%d:%s', read[1], read[2]) end
  local entry = {'m', who, 't', format('%d', now), 'h', table.concat(ranges, ','), 'r', table.concat(reads, ',')}
  if #failed > 0 then entry[#entry + 1], entry[#entry + 2] = 'a', table.concat(failed, ',') end
  outcome_append(outcomes_key, lock_key, epoch, tonumber(kept), entry)
end

if #ours > 0 and action == 'ack' then
  if encoded_outcome ~= '' then append_settled() end
  for _, one in ipairs(ours) do
    local offset = one[1]
    if offset < committed then
      -- Settled by a call that ended before it left its queue.
    elseif not bits_kept and offset == committed then
      committed = offset + 1
      base = committed
    else
      if not bits_kept then
        -- Bits of before are void: the lock tells of none.
        redis.call('DEL', acks_key)
        bits_kept = true
        base = committed
      end
      redis.call('SETBIT', acks_key, offset - base, 1)
      top = math.max(top, offset + 1)
      if offset == committed then committed = offset + 1 end
    end
  end
  committed = committed_advance(lock_key, acks_key, committed, base, top, bits_kept)
  redis.call('HDEL', attempts_key, unpack(changes))
  redis.call('ZREM', queues_key, unpack(removed))
  redis.call('HDEL', pops_key, unpack(changes))
elseif action == 'nack' then
  for _, one in ipairs(ours) do
    -- The first one of a queue decides for all behind it: they must not go on before it.
    local offset, queue = one[1], one[2]
    if queues[queue] == true then
      queues[queue] = 'back'
      redis.call('HSET', pops_key, format('%d', offset), format('0:%d:', now + ms) .. queue)
      local behind = redis.call('ZRANGEBYLEX', queues_key, '[' .. place(queue, offset + 1),
        '(' .. format('%03d', #queue) .. queue .. ':', 'LIMIT', 0, WIDTH)
      local freed = {}
      for i, member in ipairs(behind) do freed[i] = format('%d', tonumber(string.sub(member, -16))) end
      if #freed > 0 then redis.call('HDEL', pops_key, unpack(freed)) end
    end
  end
elseif action == 'extend' then
  for i, one in ipairs(ours) do
    local of = string.match(redis.call('HGET', pops_key, changes[i]), '^%d+')
    redis.call('HSET', pops_key, changes[i], format('%s:%d:', of, now + ms) .. one[2])
  end
end

-- When a queue may go on: now where nothing at its front is out, else when the last of what is out is visible.
local wake = false
for queue, _ in pairs(queues) do
  local prefix = format('%03d', #queue) .. queue
  local members = redis.call('ZRANGEBYLEX', queues_key, '[' .. prefix .. '0', '(' .. prefix .. ':', 'LIMIT', 0, WIDTH)
  local before = tonumber(redis.call('ZSCORE', due_key, queue) or '0')
  if #members == 0 then
    redis.call('ZREM', due_key, queue)
    -- Of a queue of its own, nobody waits for more than what is appended.
    wake = wake or queue == ''
  else
    local names, due = {}, now
    for i, member in ipairs(members) do names[i] = format('%d', tonumber(string.sub(member, -16))) end
    local fronts = redis.call('HMGET', pops_key, unpack(names))
    for i = 1, #names do
      if not fronts[i] then break end
      due = math.max(due, tonumber(string.match(fronts[i], '^%d+:(%d+):')))
    end
    redis.call('ZADD', due_key, format('%d', due), queue)
    wake = wake or due < before or due <= now
  end
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
