#!lua flags=allow-oom
--[[
pop_receive: give out a batch of messages of one partition to whoever asks, in order.

What is withheld together is a queue: a key, a message without a key by itself, or with scope "partition" all messages.
While anything of a queue is out and invisible, or waits for its delay, nothing of the queue is given out. Each message is
looked at once when it is new (`examined`), so one queue that waits does not make the others dear.

A batch is packed when it is given: one field, whatever it holds. It stays so until all of it is settled; where some is given
back, extended by itself or not settled in its time, its messages go into their queues (`lib/batch_unpack.lua`). So in
`queues` stand those that were looked at, are not settled, and are in no packed batch.

With classes of keys (`lib/pop_by_class.lua`) a queue that may be given out waits in `ready`, in turn with those of other
classes; `due` has -1 for it, so who knows no classes finds it due.

The count of packed batches or the queues change first, and the lock tells of them last: where the call ends in between, or where
the lock, batches or queues were removed, all that is not below committed is given again, in order, once those who may have
some of it are not waited for any more (`withheld_until`).

KEYS
  1 meta_key      hash    state, next and first offset of the partition, seal id
  2 log_key       stream  the partition's records
  3 lock_key      hash    owner ("pop"), epoch, committed, base, top, seek; pop: number of the last batch, wake_count, examined:
                          the first offset that was not looked at, withheld_until: ms until when nothing is given out,
                          packed, queued: how many packed batches, how many members of queues; parking, unparked: keys of
                          the group may be parked, unless the two are equal; class_turn: the class that was last, class_waits:
                          1: one waits for a key that is out, class_swept: the last name in class_out that was looked at
  4 acks_key      string  ack bitmap: bit i is offset base + i
  5 attempts_key  hash    offset -> <times given out>:<ms of the first>:<ms of the last>:<failed attempts>, without what
                          packed batches add
  6 pops_key      hash    offset -> <batch that it is out with, 0: given back>:<ms when it is visible>:<queue>
  7 queues_key    zset    <length of queue><queue><offset, 16 digits>
  8 due_key       zset    queue -> ms when it may be given out, inf: out with a packed batch, -1: it waits by class; \254<batch>
                          -> ms when that one is visible
  9 batches_key   hash    batch -> packed {attempt id, ms, {offset, ...}, {queue, ...}, {place of the queue, ...}}; attempt id
                          -> batch, or of one that is unpacked <batch>:<offsets>; #<slot> -> attempt id; =: how many packed
  10 rate_key     hash    left, at_us: what may be given out of the group's rate (see rate_acquire)
  11 ready_key    zset    <length of class><class><offset, 16 digits><queue>: queues that wait by class, by their first message
  12 class_out_key zset   <length of class><class>0<queue>: keys that are out, and some that were
  13 class_rates_key zset class -> ms when its bucket is full

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
  12 none_parked  int     Postgres had no parked key and no such message under this number (parking); 0: it was not asked
  13 key_class    string  what the class of a key is: p<separator> or h<header>; with scope "key" only. Without classes, it and
                          what follows are left out
  14 class_concurrency int keys of a class that are out at once; 0: no limit
  15 class_per_s  number  how many messages of a class this partition gives out by the second; 0: no limit
  16 class_size   number  how many of them at once after a rest, at least 1

RETURNS
  {"given", batch, {times given out, ...}, {failed attempts, ...}, parking, committed, {offset, m, key, body, ...}}    no
                                   times: each for the first time. parking: 0, or the number under which keys may be parked,
                                   or messages dead that are not settled
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
local ready_key = KEYS[11]
local class_out_key = KEYS[12]
local class_rates_key = KEYS[13]
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
local none_parked = tonumber(ARGV[12])
local key_class = ARGV[13]
local class_concurrency = tonumber(ARGV[14])
local class_per_s = tonumber(ARGV[15])
local class_size = tonumber(ARGV[16])

local LOOK_LIMIT = 1000
local HELD_LIMIT = 100000
local UNPACK_LIMIT = 8
local CHUNK = 50
local format = string.format
local by_class = key_class ~= nil

-- include ack_window
-- include pop_width
-- include batch_unpack
-- include pop_incomplete

if limit < 1 or limit > WIDTH then return redis.error_reply('ERR pop_receive: 1 to 500 messages') end
if scope ~= 'key' and scope ~= 'partition' then return redis.error_reply('ERR pop_receive: no such scope') end
if by_class and scope ~= 'key' then return redis.error_reply('ERR pop_receive: classes are of keys') end
local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first', 'seal')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'seek', 'pop', 'wake_count', 'examined', 'base', 'top',
  'withheld_until', 'packed', 'queued', 'parking', 'unparked', 'class_turn')
local held = tonumber(lock[2] or '0')
local in_force = held == epoch and lock[1] == 'pop'
if not in_force and held >= epoch then return {'fenced', held} end
local committed, batch, wake_count = tonumber(lock[3] or '0'), tonumber(lock[5] or '0'), tonumber(lock[6] or '0')
local examined, base, top = tonumber(lock[7] or '0'), tonumber(lock[8] or '0'), tonumber(lock[9] or '0')
local packed, queued = tonumber(lock[11] or '0'), tonumber(lock[12] or '0')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local until_ms = now + visibility_timeout_ms

local withheld_until = tonumber(lock[10] or '0')
local function begin_at_committed(seek_count)
  local at_first = format('%d', committed)
  examined, base, top, packed, queued = committed, committed, 0, 0, 0
  redis.call('HSET', lock_key, 'seek', seek_count, 'committed', at_first, 'base', at_first, 'top', '0', 'examined', at_first,
    'withheld_until', format('%d', withheld_until), 'packed', '0', 'queued', '0')
end
if committed == 0 or tonumber(lock[4] or '0') < seek then
  local gone = redis.call('UNLINK', acks_key, attempts_key, pops_key, queues_key, due_key, batches_key, ready_key, class_out_key)
  -- Without a lock, it was removed: receivers may have some of what is given again.
  if not lock[3] and gone > 0 then withheld_until = until_ms end
  -- A partition that fell back below the start begins anew: what comes now is new to the group.
  committed = math.max(math.min(start, next_offset), tonumber(meta[3] or '1'))
  begin_at_committed(format('%d', seek))
elseif pop_incomplete(log_key, acks_key, queues_key, due_key, batches_key, committed, base, top, examined, packed, queued)
  or (by_class and redis.call('ZCOUNT', due_key, '-1', '-1') > redis.call('ZCARD', ready_key)) then
  withheld_until = until_ms
  redis.call('HSET', lock_key, 'withheld_until', format('%d', withheld_until))
  redis.call('UNLINK', acks_key, pops_key, queues_key, due_key, batches_key, ready_key, class_out_key)
  begin_at_committed(lock[4] or '0')
end
local parking, unparked = tonumber(lock[13] or '0'), tonumber(lock[14] or '0')
if not in_force then
  -- What another node or an earlier time knew of parked keys may not be known here.
  parking = parking + 1
  redis.call('HSET', lock_key, 'owner', 'pop', 'epoch', format('%d', epoch), 'parking', format('%d', parking))
elseif none_parked > unparked and none_parked == parking then
  unparked = parking
  redis.call('HSET', lock_key, 'unparked', format('%d', unparked))
end

-- The group has no classes any more, and nothing waits by one.
if not by_class and lock[15] and redis.call('ZCOUNT', due_key, '-1', '-1') == 0 then
  redis.call('UNLINK', ready_key, class_out_key, class_rates_key)
  redis.call('HDEL', lock_key, 'class_turn', 'class_waits', 'class_swept')
end

if withheld_until > now then return {'blocked', withheld_until - now, next_offset, wake_count} end

local function record_at(offset)
  local id = format('%d-0', offset)
  local entry = redis.call('XRANGE', log_key, id, id)[1]
  return entry and entry[2]
end
-- What is told of records: how often each was given out and failed; nothing where all of them come for the first time.
local function given_reply(number, offsets, records, counted)
  local names, reply, times, failures, again, failed = {}, {}, {}, {}, false, false
  for i, record in ipairs(records) do
    local n = 4 * i
    reply[n - 3], reply[n - 2], reply[n - 1], reply[n] = offsets[i], record[2], record[4], record[6]
  end
  if redis.call('EXISTS', attempts_key) == 1 then
    for i, offset in ipairs(offsets) do names[i] = format('%d', offset) end
    for i, noted in ipairs(redis.call('HMGET', attempts_key, unpack(names))) do
      local count, _, _, failures_of = attempt_parts(noted)
      times[i], failures[i] = count + counted, failures_of
      again, failed = again or times[i] > 1, failed or failures_of > 0
    end
  end
  return {'given', number, again and times or {}, failed and failures or {}, parking ~= unparked and parking or 0, committed, reply}
end

local known = redis.call('HGET', batches_key, attempt)
if known then
  local number, listed = string.match(known, '^(%d+):?(.*)$')
  local offsets, records = {}, {}
  local function note(offset)
    local record = offset >= committed and record_at(offset)
    if record then offsets[#offsets + 1], records[#records + 1] = offset, record end
  end
  local packed_batch = redis.call('HGET', batches_key, number)
  if packed_batch then
    local all = cmsgpack.unpack(packed_batch)[3]
    local is_settled = settled_in(acks_key, committed, base, top, all)
    for _, offset in ipairs(all) do
      if not is_settled(offset) then note(offset) end
    end
    if #records > 0 then
      redis.call('ZADD', due_key, 'GT', format('%d', until_ms), batch_name(number))
      return given_reply(tonumber(number), offsets, records, 1)
    end
  else
    local names, pops, queues = {}, {}, {}
    for name in string.gmatch(listed, '%d+') do names[#names + 1] = name end
    for i, one in ipairs(redis.call('HMGET', pops_key, unpack(names))) do
      local of, visible, queue = string.match(one or '', '^(%d+):(%d+):(.*)$')
      if of == number then
        local n, later = #records, math.max(tonumber(visible), until_ms)
        note(tonumber(names[i]))
        if #records > n then
          pops[#pops + 1] = names[i]
          pops[#pops + 1] = format('%s:%d:', number, later) .. queue
          queues[queue] = math.max(queues[queue] or 0, later)
        end
      end
    end
    if #records > 0 then
      redis.call('HSET', pops_key, unpack(pops))
      for queue, later in pairs(queues) do redis.call('ZADD', due_key, 'GT', format('%d', later), queue) end
      return given_reply(tonumber(number), offsets, records, 0)
    end
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

-- What is given: offset, record and place of its queue each. Of a queue, "whole": all of it that was looked at is given, or
-- there is none; "part": something of it stays behind.
local offsets, records, places, queues, place_of, states = {}, {}, {}, {}, {}, {}
local left_queues, dropped, held_back, suspects, size, given = {}, {}, {}, {}, 0, 0
-- What its topic's limits settled in its queue, and its places there.
local passed, passed_places = {}, {}
local function has_room() return given < limit and size < bytes end
local function give(offset, queue, record)
  given = given + 1
  local place = place_of[queue]
  if not place then
    place = #queues + 1
    queues[place], place_of[queue] = queue, place
  end
  offsets[given], records[given], places[given] = offset, record, place
  size = size + #record[4] + #record[6]
end
-- By class, all that is due waits in turn; what waits already is not due.
local function due_now()
  return redis.call('ZRANGEBYSCORE', due_key, by_class and '0' or '-inf', format('%d', now), 'LIMIT', 0, by_class and WIDTH or limit)
end

local more, waits, due = false, redis.call('EXISTS', due_key) == 1, {}
if not only_repeat and waits then
  local over, found = 0, true
  due = due_now()
  while found do
    found = false
    for _, queue in ipairs(due) do
      if string.byte(queue) == 254 then
        if over < UNPACK_LIMIT then
          local number = string.sub(queue, 2)
          batch_unpack(number, redis.call('HGET', batches_key, number), committed, base, top, now)
          over, found = over + 1, true
        else
          more = true
        end
      end
    end
    -- Other batches may stand before the queues that are due now.
    if found then due = due_now() end
  end
  if over > 0 then
    packed, queued = tonumber(redis.call('HGET', batches_key, '=')), redis.call('ZCARD', queues_key)
    redis.call('HSET', lock_key, 'packed', format('%d', packed), 'queued', format('%d', queued))
  end
  for _, queue in ipairs(by_class and {} or due) do
    if not has_room() then break end
    if string.byte(queue) ~= 254 then
      local members = redis.call('ZRANGEBYLEX', queues_key, '[' .. queue_prefix(queue) .. '0', '(' .. queue_prefix(queue) .. ':', 'LIMIT', 0, WIDTH)
      states[queue] = #members < WIDTH and 'whole' or 'part'
      for i, member in ipairs(members) do
        local offset = tonumber(string.sub(member, -16))
        local name = format('%d', offset)
        local record = offset >= committed and states[queue] ~= 'stuck' and has_room() and record_at(offset)
        if offset < committed then
          passed[#passed + 1], passed_places[#passed_places + 1] = name, member
        elseif record then
          if i == 1 then suspects[#suspects + 1] = name end
          give(offset, queue, record)
          left_queues[#left_queues + 1] = member
        elseif has_room() then
          -- Somebody removed a record: what is behind it waits, and is out with nobody.
          states[queue] = 'stuck'
        elseif states[queue] ~= 'stuck' then
          states[queue] = 'part'
        end
        if offset >= committed then dropped[#dropped + 1] = name end
      end
      if #members == WIDTH and not place_of[queue] and states[queue] == 'part' then more = true end
    end
  end
  -- Queues that limits emptied stand before others that are due.
  if not by_class and #passed > 0 and #due == limit then more = true end
end

local at, looked = examined, 0
local may_look = not only_repeat
if scope == 'partition' then
  may_look = may_look and (states[''] == 'whole' or (not states[''] and not redis.call('ZSCORE', due_key, '')))
else
  may_look = may_look and queued < HELD_LIMIT
end
may_look = may_look and examined < committed + WINDOW
local note_classes, class_wait = nil, -1
if by_class and not only_repeat then
-- Here, since calls without classes would pay for its functions.
-- include pop_by_class
  note_classes, class_wait = give_by_class(due)
  if not note_classes then return {'absent'} end
end
while not by_class and may_look and has_room() and at < next_offset and looked < LOOK_LIMIT do
  -- Behind what is held back, nobody knows how much is to be given; nor of how many bytes before some was.
  local count = CHUNK
  if #held_back == 0 and given > 0 then count = math.floor((bytes - size) * given / (size + 1)) + 1 end
  if #held_back == 0 then count = math.min(count, limit - given) end
  local entries = redis.call('XRANGE', log_key, format('%d-0', at), format('%d-0', next_offset - 1), 'COUNT', math.min(count, WIDTH))
  if #entries == 0 then
    if redis.call('EXISTS', log_key) == 0 then return {'absent'} end
    break
  end
  local names = {}
  if scope == 'key' then
    for i, entry in ipairs(entries) do
      local key = entry[2][4]
      names[i] = key == '\255' and '\255' .. string.sub(entry[1], 1, -3) or key
    end
  end
  local times = waits and scope == 'key' and redis.call('ZMSCORE', due_key, unpack(names))
  for i, entry in ipairs(entries) do
    if not has_room() then break end
    local offset, queue = tonumber(string.sub(entry[1], 1, -3)), names[i] or ''
    local state = states[queue]
    if not state then
      state = times and times[i] and 'part' or 'whole'
      states[queue] = state
    end
    if state == 'whole' then
      give(offset, queue, entry[2])
    else
      held_back[#held_back + 1] = '0'
      held_back[#held_back + 1] = queue_prefix(queue) .. format('%016d', offset)
    end
    looked = looked + 1
    at = offset + 1
  end
end

if given > 0 then
  batch = batch + 1
  local number, due = format('%d', batch), {format('%d', until_ms), batch_name(format('%d', batch))}
  for _, queue in ipairs(queues) do due[#due + 1], due[#due + 2] = 'inf', queue end
  local packed_batch = cmsgpack.pack({attempt, now, offsets, queues, #queues > 1 and places or {}})
  packed = packed + 1
  redis.call('HSET', batches_key, '=', format('%d', packed), number, packed_batch, attempt, number)
  -- The queues are closed before anything leaves them.
  redis.call('ZADD', due_key, unpack(due))
end
for i = 1, #passed, WIDTH do
  local upto = math.min(i + WIDTH - 1, #passed)
  redis.call('ZREM', queues_key, unpack(passed_places, i, upto))
  redis.call('HDEL', pops_key, unpack(passed, i, upto))
  redis.call('HDEL', attempts_key, unpack(passed, i, upto))
end
for i = 1, #left_queues, WIDTH do
  redis.call('ZREM', queues_key, unpack(left_queues, i, math.min(i + WIDTH - 1, #left_queues)))
end
for i = 1, #held_back, 2 * WIDTH do
  redis.call('ZADD', queues_key, unpack(held_back, i, math.min(i + 2 * WIDTH - 1, #held_back)))
end
-- The first message of a queue that was not settled in its time failed; those behind it were not begun.
if #suspects > 0 then
  local late = redis.call('HMGET', pops_key, unpack(suspects))
  local times = redis.call('HMGET', attempts_key, unpack(suspects))
  for i, offset in ipairs(suspects) do
    if late[i] and string.sub(late[i], 1, 2) ~= '0:' then redis.call('HSET', attempts_key, offset, attempt_failed(times[i])) end
  end
end
for i = 1, #dropped, WIDTH do
  redis.call('HDEL', pops_key, unpack(dropped, i, math.min(i + WIDTH - 1, #dropped)))
end
for queue, state in pairs(states) do
  -- Looked for again at times only: nobody can say when it goes on. What is given of it is settled first.
  if state == 'stuck' and not place_of[queue] then redis.call('ZADD', due_key, format('%d', until_ms), queue) end
  -- Limits settled all of it, or a call that ended in its middle left the time of a queue in which nothing stands.
  if state == 'whole' and not place_of[queue] then redis.call('ZREM', due_key, queue) end
end
if #left_queues + #held_back + #passed > 0 then queued = redis.call('ZCARD', queues_key) end
if note_classes then note_classes() end
if given > 0 then
  if per_s > 0 then note_rate(rate_left - given) end
  redis.call('HSET', lock_key, 'pop', format('%d', batch), 'examined', format('%d', math.max(at, examined)),
    'packed', format('%d', packed), 'queued', format('%d', queued))
  return given_reply(batch, offsets, records, 1)
end

if at > examined or #passed > 0 then
  redis.call('HSET', lock_key, 'examined', format('%d', at), 'queued', format('%d', queued))
end
if meta[1] == 'sealed' and committed >= next_offset then return {'drained', meta[4]} end
local soonest = redis.call('ZRANGEBYSCORE', due_key, format('(%d', now), '(inf', 'WITHSCORES', 'LIMIT', 0, 1)
local left = soonest[2] and tonumber(soonest[2]) - now or -1
if class_wait >= 0 and (left < 0 or class_wait < left) then left = class_wait end
if more or (looked >= LOOK_LIMIT and at < next_offset) then return {'more', 0, next_offset, wake_count} end
return {may_look and 'empty' or 'blocked', left, next_offset, wake_count}
