#!lua flags=allow-oom
--[[
pop_receive: give out a batch of messages of one partition to whoever asks, in order.

What is withheld together is a queue: a key, a message without a key by itself, or with scope "partition" all messages.
A queue's messages that are not settled stand in `queues`; those at its front may be out. While any of them is out and
invisible, or waits for its delay, nothing of the queue is given out. Each message is looked at once when it is new
(`examined`), so one queue that waits does not make the others dear.

The queues are written first and `examined` last: where the call ends in between, what it looked at is looked at again. Where the
lock or what stands in queues was removed, all that is not below committed is given again, in order, once those who may have
some of it are not waited for any more (`withheld_until`).

KEYS
  1 meta_key      hash    state, next and first offset of the partition, seal id
  2 log_key       stream  the partition's records
  3 lock_key      hash    owner ("pop"), epoch, committed, base, top, seek; pop: number of the last batch, wake_count, examined:
                          the first offset that was not looked at, withheld_until: ms until when nothing is given out
  4 acks_key      string  ack bitmap: bit i is offset base + i
  5 attempts_key  hash    offset -> <times given out>:<ms of the first>:<ms of the last>
  6 pops_key      hash    offset -> <batch that it is out with, 0: given back>:<ms when it is visible>:<queue>
  7 queues_key    zset    <length of queue><queue><offset, 16 digits> of what was looked at and is not settled
  8 due_key       zset    queue -> ms when it may be given out
  9 batches_key   hash    attempt id -> <batch>:<offsets>; #<slot> -> attempt id
  10 rate_key     hash    left, at_us: what may be given out of the group's rate (see rate_acquire)

ARGV
  1 epoch         int     epoch of the group at this partition
  2 start         int     offset at which the group starts here, used where nothing is committed yet
  3 seek          int     how often the group was sent elsewhere: all that was before the last time is void
  4 scope         string  "partition" or "key": what is withheld behind a message that is out
  5 limit         int     1 to 500 messages
  6 bytes         int     no more once the bodies have so many
  7 visibility_timeout_ms int     how long they are withheld from others
  8 attempt       string  id of this attempt: the same one gets the same batch again, and nothing is counted
  9 only_repeat   int     1: give out nothing but a batch of this attempt
  10 per_s        number  how many messages this partition gives out by the second; 0: no limit
  11 rate_size    number  how many of them at once after a rest, at least 1

RETURNS
  {"given", batch, {offset, times given out, m, key, body, ...}}
  {"more", 0, next, wake_count}         nothing as yet, and there is more to look at: ask again
  {"empty", left, next, wake_count}     nothing; what is appended may be given at once. left: ms until a queue is free again,
                                   -1 for none; wake_count: number of the last entry that told of a queue that got free
  {"blocked", left, next, wake_count}   nothing, whatever is appended; left is also the time until the rate gives a message
  {"drained", seal}                everything before the command record is settled
  {"fenced", epoch}                a higher epoch is in force; nothing was changed
  {"absent"}                       no such partition on this node, or its records are gone
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
local rate_key = KEYS[10]
local epoch = tonumber(ARGV[1])
local start = tonumber(ARGV[2])
local seek = tonumber(ARGV[3])
local scope = ARGV[4]
local limit = tonumber(ARGV[5])
local bytes = tonumber(ARGV[6])
local visibility_timeout_ms = tonumber(ARGV[7])
local attempt = ARGV[8]
local only_repeat = ARGV[9] == '1'
local per_s = tonumber(ARGV[10])
local rate_size = tonumber(ARGV[11])

local LOOK_LIMIT = 1000
local HELD_LIMIT = 100000
local CHUNK = 50
local KEPT_BATCHES = 256
local format = string.format

-- include ack_window
-- include pop_width
-- include pop_incomplete

if limit < 1 or limit > WIDTH then return redis.error_reply('ERR pop_receive: 1 to 500 messages') end
if scope ~= 'key' and scope ~= 'partition' then return redis.error_reply('ERR pop_receive: no such scope') end
local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first', 'seal')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'seek', 'pop', 'wake_count', 'examined', 'base', 'top', 'withheld_until')
local held = tonumber(lock[2] or '0')
local in_force = held == epoch and lock[1] == 'pop'
if not in_force and held >= epoch then return {'fenced', held} end
local committed, batch, wake_count = tonumber(lock[3] or '0'), tonumber(lock[5] or '0'), tonumber(lock[6] or '0')
local examined = tonumber(lock[7] or '0')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local until_ms = now + visibility_timeout_ms

local withheld_until, at_first = tonumber(lock[10] or '0'), format('%d', committed)
if committed == 0 or tonumber(lock[4] or '0') < seek then
  local gone = redis.call('UNLINK', acks_key, attempts_key, pops_key, queues_key, due_key, batches_key)
  -- Without a lock, it was removed: receivers may have some of what is given again.
  if not lock[3] and gone > 0 then withheld_until = until_ms end
  -- A partition that fell back below the start begins anew: what comes now is new to the group.
  committed = math.max(math.min(start, next_offset), tonumber(meta[3] or '1'))
  at_first, examined = format('%d', committed), committed
  redis.call('HSET', lock_key, 'seek', format('%d', seek), 'committed', at_first, 'base', at_first, 'top', '0',
    'examined', at_first, 'withheld_until', format('%d', withheld_until))
elseif pop_incomplete(log_key, acks_key, queues_key, due_key, committed, tonumber(lock[8]), tonumber(lock[9] or '0'), examined) then
  withheld_until, examined = until_ms, committed
  redis.call('HSET', lock_key, 'withheld_until', format('%d', withheld_until))
  redis.call('UNLINK', acks_key, pops_key, queues_key, due_key, batches_key)
  redis.call('HSET', lock_key, 'base', at_first, 'top', '0', 'examined', at_first)
end
if not in_force then redis.call('HSET', lock_key, 'owner', 'pop', 'epoch', format('%d', epoch)) end

if withheld_until > now then return {'blocked', withheld_until - now, next_offset, wake_count} end

-- A queue may hold zero bytes, at which %s ends.
local function prefix_of(queue) return format('%03d', #queue) .. queue end
local function record_at(offset)
  local id = format('%d-0', offset)
  local entry = redis.call('XRANGE', log_key, id, id)[1]
  return entry and entry[2]
end

local known = redis.call('HGET', batches_key, attempt)
if known then
  local number, listed = string.match(known, '^(%d+):(.*)$')
  local again, offsets, queues = {}, {}, {}
  for offset in string.gmatch(listed, '%d+') do offsets[#offsets + 1] = offset end
  local out = redis.call('HMGET', pops_key, unpack(offsets))
  local times = redis.call('HMGET', attempts_key, unpack(offsets))
  local pops = {}
  for i, offset in ipairs(offsets) do
    local of, visible, queue = string.match(out[i] or '', '^(%d+):(%d+):(.*)$')
    local record = of == number and record_at(tonumber(offset))
    if record then
      local n = #again
      again[n + 1], again[n + 2] = tonumber(offset), tonumber(string.match(times[i] or '1', '^%d+'))
      again[n + 3], again[n + 4], again[n + 5] = record[2], record[4], record[6]
      local later = math.max(tonumber(visible), until_ms)
      pops[#pops + 1] = offset
      pops[#pops + 1] = format('%s:%d:', number, later) .. queue
      queues[queue] = math.max(queues[queue] or 0, later)
    end
  end
  if #again > 0 then
    redis.call('HSET', pops_key, unpack(pops))
    for queue, later in pairs(queues) do redis.call('ZADD', due_key, 'GT', format('%d', later), queue) end
    return {'given', tonumber(number), again}
  end
end

-- A batch that is given again was counted when it was given first.
local rate_left = 0
local function note_rate(left)
  redis.call('HSET', rate_key, 'left', format('%.9f', left),
    'at_us', format('%d', tonumber(time[1]) * 1000000 + tonumber(time[2])))
  redis.call('PEXPIRE', rate_key, format('%d', math.min(1e12, 60000 + math.ceil((rate_size - left) / per_s * 1000))))
end
if per_s > 0 and not only_repeat then
  local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local bucket = redis.call('HMGET', rate_key, 'left', 'at_us')
  rate_left = 1
  if bucket[1] then
    rate_left = tonumber(bucket[1]) + math.max(0, now_us - tonumber(bucket[2])) / 1000000 * per_s
  end
  rate_left = math.min(rate_left, rate_size)
  if not bucket[1] or now_us < tonumber(bucket[2]) then note_rate(rate_left) end
  limit = math.min(limit, math.floor(rate_left))
  if limit < 1 and not (meta[1] == 'sealed' and committed >= next_offset) then
    return {'blocked', math.ceil((1 - rate_left) / per_s * 1000), next_offset, wake_count}
  end
end

-- What is given: offset, queue and record each. Of a queue, "whole": all of it that was looked at is given, or there is
-- none; "part": something of it stays behind.
local given, states, dropped, held_back, size = {}, {}, {}, {}, 0
-- What is settled: by its topic's limits, or by a call that ended before it left its queue. And its places in queues.
local passed, places = {}, {}
-- What stands in queues beyond `examined`: by a call that ended in its middle.
local ahead = {}
local function has_room() return #given < limit and size < bytes end
local function give(offset, queue, record)
  given[#given + 1] = {offset, queue, record}
  size = size + #record[4] + #record[6]
end

if not only_repeat then
  local queues = redis.call('ZRANGEBYSCORE', due_key, '-inf', format('%d', now), 'LIMIT', 0, limit)
  for _, queue in ipairs(queues) do
    if not has_room() then break end
    local prefix = prefix_of(queue)
    local members = redis.call('ZRANGEBYLEX', queues_key, '[' .. prefix .. '0', '(' .. prefix .. ':', 'LIMIT', 0, WIDTH)
    states[queue] = #members < WIDTH and 'whole' or 'part'
    -- A call that ended in its middle left the time of a queue in which nothing stands.
    if #members == 0 then redis.call('ZREM', due_key, queue) end
    for _, member in ipairs(members) do
      local offset = tonumber(string.sub(member, -16))
      if offset >= examined then ahead[offset] = true end
      local record = offset >= committed and states[queue] ~= 'stuck' and has_room() and record_at(offset)
      if offset < committed then
        passed[#passed + 1], places[#places + 1] = format('%d', offset), member
      elseif record then
        give(offset, queue, record)
      else
        -- Somebody removed a record, or there is no room: what is behind it waits, and is out with nobody.
        if has_room() then states[queue] = 'stuck' elseif states[queue] ~= 'stuck' then states[queue] = 'part' end
        dropped[#dropped + 1] = format('%d', offset)
      end
    end
  end
end

local at, looked = examined, 0
local may_look = not only_repeat
if scope == 'partition' then
  may_look = may_look and (states[''] == 'whole' or (not states[''] and not redis.call('ZSCORE', due_key, '')))
else
  may_look = may_look and redis.call('ZCARD', queues_key) < HELD_LIMIT
end
may_look = may_look and examined < committed + WINDOW
while may_look and has_room() and at < next_offset and looked < LOOK_LIMIT do
  -- Behind what is held back, nobody knows how much is to be given.
  local count = #held_back > 0 and CHUNK or math.min(CHUNK, limit - #given)
  local entries = redis.call('XRANGE', log_key, format('%d-0', at), format('%d-0', next_offset - 1), 'COUNT', count)
  if #entries == 0 then
    if redis.call('EXISTS', log_key) == 0 then return {'absent'} end
    break
  end
  for _, entry in ipairs(entries) do
    if not has_room() then break end
    local offset, record = tonumber(string.match(entry[1], '^%d+')), entry[2]
    local queue = ''
    if scope == 'key' then queue = record[4] == '\255' and '\255' .. format('%d', offset) or record[4] end
    if not states[queue] then states[queue] = redis.call('ZSCORE', due_key, queue) and 'part' or 'whole' end
    if ahead[offset] then
      -- It was found in its queue already.
    elseif states[queue] == 'whole' then
      give(offset, queue, record)
    else
      held_back[#held_back + 1] = prefix_of(queue) .. format('%016d', offset)
    end
    looked = looked + 1
    at = offset + 1
  end
end

for i = 1, #passed, WIDTH do
  local upto = math.min(i + WIDTH - 1, #passed)
  redis.call('ZREM', queues_key, unpack(places, i, upto))
  redis.call('HDEL', pops_key, unpack(passed, i, upto))
  redis.call('HDEL', attempts_key, unpack(passed, i, upto))
end
if #dropped > 0 then
  for i = 1, #dropped, WIDTH do
    redis.call('HDEL', pops_key, unpack(dropped, i, math.min(i + WIDTH - 1, #dropped)))
  end
end
for queue, state in pairs(states) do
  -- Looked for again at times only: nobody can say when it goes on.
  if state == 'stuck' then redis.call('ZADD', due_key, format('%d', until_ms), queue) end
end
local queued = {}
for _, member in ipairs(held_back) do
  queued[#queued + 1] = '0'
  queued[#queued + 1] = member
end
if #given > 0 and per_s > 0 then note_rate(rate_left - #given) end
if #given > 0 then
  batch = batch + 1
  local offsets, pops, queue_due, due, counts, reply = {}, {}, {}, {}, {}, {}
  for i, one in ipairs(given) do offsets[i] = format('%d', one[1]) end
  local times = redis.call('HMGET', attempts_key, unpack(offsets))
  for i, one in ipairs(given) do
    local offset, queue, record = offsets[i], one[2], one[3]
    local count, first = string.match(times[i] or '', '^(%d+):(%d+):')
    local times_given = tonumber(count or '0') + 1
    pops[2 * i - 1], pops[2 * i] = offset, format('%d:%d:', batch, until_ms) .. queue
    counts[2 * i - 1], counts[2 * i] = offset, format('%d:%s:%d', times_given, first or format('%d', now), now)
    queued[#queued + 1] = '0'
    queued[#queued + 1] = prefix_of(queue) .. format('%016d', one[1])
    if not queue_due[queue] then
      queue_due[queue] = true
      due[#due + 1], due[#due + 2] = format('%d', until_ms), queue
    end
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4], reply[n + 5] = one[1], times_given, record[2], record[4], record[6]
  end
  -- The queues are closed before anything is said to be out.
  redis.call('ZADD', due_key, unpack(due))
  for i = 1, #queued, 2 * WIDTH do redis.call('ZADD', queues_key, unpack(queued, i, math.min(i + 2 * WIDTH - 1, #queued))) end
  redis.call('HSET', pops_key, unpack(pops))
  redis.call('HSET', attempts_key, unpack(counts))
  local slot = format('#%d', batch % KEPT_BATCHES)
  local oldest = redis.call('HGET', batches_key, slot)
  if oldest then
    local noted = redis.call('HGET', batches_key, oldest)
    if noted and tonumber(string.match(noted, '^%d+')) == batch - KEPT_BATCHES then
      redis.call('HDEL', batches_key, oldest)
    end
  end
  redis.call('HSET', batches_key, slot, attempt, attempt, format('%d:%s', batch, table.concat(offsets, ',')))
  redis.call('HSET', lock_key, 'pop', format('%d', batch), 'examined', format('%d', math.max(at, examined)))
  return {'given', batch, reply}
end

for i = 1, #queued, 2 * WIDTH do redis.call('ZADD', queues_key, unpack(queued, i, math.min(i + 2 * WIDTH - 1, #queued))) end
if at > examined then redis.call('HSET', lock_key, 'examined', format('%d', at)) end
if meta[1] == 'sealed' and committed >= next_offset then return {'drained', meta[4]} end
local soonest = redis.call('ZRANGEBYSCORE', due_key, format('(%d', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
local left = soonest[2] and tonumber(soonest[2]) - now or -1
if looked >= LOOK_LIMIT and at < next_offset then return {'more', 0, next_offset, wake_count} end
return {may_look and 'empty' or 'blocked', left, next_offset, wake_count}
