local CLASS_LENGTH = 255
local FULL_MS = 60000
local CLASSES_WAIT_MS = 100
-- By another name: what is called by its own is read as a command of Redis.
local protected = pcall

local function class_prefix(class) return format('%03d', #class) .. class end

-- Give messages of all classes in turn, one of each class at a time, from `due` queues, those that wait and new records.
-- Return a function that writes the classes' state, before the lock tells of what was given; and the ms until a class that
-- waits for its rate has a message, or -1. Return nil if the log is gone.
local function give_by_class(due)
  local by_header, needle = string.sub(key_class, 1, 1) == 'h', string.sub(key_class, 2)
  local exact_ms = tonumber(time[1]) * 1000 + tonumber(time[2]) / 1000
  local facts = redis.call('HMGET', lock_key, 'class_turn', 'class_waits', 'class_swept')
  local turn, waiting, swept, class_wait = facts[1] or '', false, facts[3] or '', -1
  local pops_there = redis.call('EXISTS', pops_key) == 1
  local named, spent_names, out_names, rates = {}, {}, {}, {}

  local function class_of(queue, m)
    local class = ''
    if not by_header then
      local at = string.byte(queue) ~= 255 and string.find(queue, needle, 1, true)
      if at then class = string.sub(queue, 1, at - 1) end
    elseif m and string.find(m, needle, 1, true) then
      local read, headers = protected(cjson.decode, string.sub(m, string.find(m, '{', 1, true) or 1))
      local told = read and type(headers) == 'table' and headers[needle]
      if type(told) == 'string' then class = told end
    end
    return string.sub(class, 1, CLASS_LENGTH)
  end
  local function members_of(queue, count)
    return redis.call('ZRANGEBYLEX', queues_key, '[' .. queue_prefix(queue) .. '0', '(' .. queue_prefix(queue) .. ':', 'LIMIT', 0, count)
  end
  local function offset_of(member) return tonumber(string.sub(member, -16)) end
  local function index_name(class, offset, queue) return class_prefix(class) .. format('%016d', offset) .. queue end

  -- Queues that are due wait by class from now on; their names come first.
  local function note_ready()
    local names, times, empty = {}, {}, {}
    for _, queue in ipairs(due) do
      local front = string.byte(queue) ~= 254 and members_of(queue, 1)[1]
      if front then
        local record = by_header and record_at(offset_of(front))
        names[#names + 1], names[#names + 2] = '0', index_name(class_of(queue, record and record[2]), offset_of(front), queue)
        times[#times + 1], times[#times + 2] = '-1', queue
      elseif front == nil then
        empty[#empty + 1] = queue
      end
    end
    if #names > 0 then
      redis.call('ZADD', ready_key, unpack(names))
      redis.call('ZADD', due_key, unpack(times))
    end
    if #empty > 0 then redis.call('ZREM', due_key, unpack(empty)) end
  end
  note_ready()

  -- New records: of queues of which nothing is known, by class; of others, behind what stands there.
  local fresh, fresh_classes, fresh_names, behind = {}, {}, {}, {}
  local function note_new(entry, queue, known)
    local message = {offset = tonumber(string.sub(entry[1], 1, -3)), record = entry[2]}
    if fresh[queue] then
      table.insert(fresh[queue].messages, message)
    elseif known then
      behind[queue] = behind[queue] or {}
      table.insert(behind[queue], message)
    else
      local class = class_of(queue, entry[2][2])
      fresh[queue] = {queue = queue, class = class, messages = {message}, at = 1}
      if not fresh_names[class] then
        fresh_names[class] = {}
        fresh_classes[#fresh_classes + 1] = class
      end
      table.insert(fresh_names[class], queue)
    end
    looked, at = looked + 1, message.offset + 1
    return #entry[2][4] + #entry[2][6]
  end
  local looked_bytes = 0
  while may_look and looked_bytes < bytes and at < next_offset and looked < LOOK_LIMIT do
    local entries = redis.call('XRANGE', log_key, format('%d-0', at), format('%d-0', next_offset - 1), 'COUNT', CHUNK)
    if #entries == 0 then
      if redis.call('EXISTS', log_key) == 0 then return nil end
      break
    end
    local names = {}
    for i, entry in ipairs(entries) do
      local key = entry[2][4]
      names[i] = key == '\255' and '\255' .. string.sub(entry[1], 1, -3) or key
    end
    local times = waits and redis.call('ZMSCORE', due_key, unpack(names)) or {}
    for i, entry in ipairs(entries) do looked_bytes = looked_bytes + note_new(entry, names[i], times[i]) end
  end

  -- What a class may begin of its rate: a time at which its bucket is full stands for what is in it.
  local function permits_of(class)
    if class_per_s <= 0 then return nil end
    local full_at = redis.call('ZSCORE', class_rates_key, class)
    if not full_at then return 1 end
    local left = class_size - math.max(0, tonumber(full_at) - exact_ms) / 1000 * class_per_s
    -- A clock that went back: the bucket fills on from the new time.
    if left < -0.001 then rates[class] = 0 end
    return math.max(0, left)
  end
  local function lacks_permit(one)
    if not one.permits or one.permits >= 0.999999 then return false end
    local wait_ms = math.ceil((1 - one.permits) / class_per_s * 1000)
    class_wait = class_wait < 0 and wait_ms or math.min(class_wait, wait_ms)
    return true
  end

  -- A key is out while its queue is withheld and its first message is with a receiver.
  local function is_out(queue, queue_due)
    if not queue_due or tonumber(queue_due) <= now then return false end
    if tonumber(queue_due) == math.huge then return true end
    local front = members_of(queue, 1)[1]
    local noted = front and redis.call('HGET', pops_key, format('%d', offset_of(front)))
    return noted and string.sub(noted, 1, 2) ~= '0:' or false
  end
  -- Drop the names of keys that are not out any more.
  local function sweep_out(first, last, skipped, count)
    local names, queues_named, gone = redis.call('ZRANGEBYLEX', class_out_key, first, last, 'LIMIT', skipped, count), {}, {}
    if #names == 0 then return 0, '' end
    for i, name in ipairs(names) do queues_named[i] = string.sub(name, 5 + tonumber(string.sub(name, 1, 3))) end
    for i, queue_due in ipairs(redis.call('ZMSCORE', due_key, unpack(queues_named))) do
      if not is_out(queues_named[i], queue_due) then gone[#gone + 1] = names[i] end
    end
    if #gone > 0 then redis.call('ZREM', class_out_key, unpack(gone)) end
    return #gone, #names == count and names[count] or ''
  end
  -- Say whether a class has as many keys out as it may. Names of keys that are back count until that matters.
  local function lacks_keys(one)
    if class_concurrency <= 0 then return false end
    local first, last = '[' .. class_prefix(one.name) .. '0', '(' .. class_prefix(one.name) .. '1'
    one.out = one.out or redis.call('ZLEXCOUNT', class_out_key, first, last)
    if one.out + one.taken < class_concurrency then return false end
    if not one.swept then
      one.swept = true
      one.out = one.out - sweep_out(first, last, one.out > WIDTH and batch * WIDTH % one.out or 0, WIDTH)
    end
    local lacks = one.out + one.taken >= class_concurrency
    waiting = waiting or lacks
    return lacks
  end

  -- The classes that take turns in this call: those behind the one that was last, then classes that are new.
  local ring, visited, visits, last_visited = {}, {}, 0, turn
  local function visit(class)
    visited[class] = true
    local one = {name = class, from = '[' .. class_prefix(class) .. '0', permits = permits_of(class), fresh = fresh_names[class] or {},
      next_fresh = 1, taken = 0}
    if not lacks_permit(one) and not lacks_keys(one) then ring[#ring + 1] = one end
  end
  local parts = {{'(' .. class_prefix(turn) .. ':', '+'}, {'-', '(' .. class_prefix(turn) .. ':'}}
  local next_part, next_fresh = 1, 1
  -- Add the next class that may give; false where none is left, or a call has looked at enough of them.
  local function visit_next()
    local before = #ring
    while #ring == before and next_part <= #parts and visits < WIDTH do
      local part = parts[next_part]
      local name = redis.call('ZRANGEBYLEX', ready_key, part[1], part[2], 'LIMIT', 0, 1)[1]
      if name then
        local class = string.sub(name, 4, 3 + tonumber(string.sub(name, 1, 3)))
        visits, last_visited = visits + 1, class
        visit(class)
        part[1] = '(' .. class_prefix(class) .. ':'
      else
        next_part = next_part + 1
      end
    end
    while #ring == before and next_fresh <= #fresh_classes do
      if not visited[fresh_classes[next_fresh]] then visit(fresh_classes[next_fresh]) end
      next_fresh = next_fresh + 1
    end
    return #ring > before
  end

  local opened, names_looked_at = {}, 0
  local function open_known(one, name, queue)
    -- Where nothing is out by itself, no more is looked at than can be given.
    local count = pops_there and WIDTH or math.min(WIDTH, limit - given + 1)
    local members, messages = members_of(queue, count), {}
    -- Limits settled what stands at its front: that leaves the queue first.
    if count < WIDTH and members[1] and offset_of(members[1]) < committed then
      count = WIDTH
      members = members_of(queue, count)
    end
    states[queue] = #members < count and 'whole' or 'part'
    for i, member in ipairs(members) do
      local offset = offset_of(member)
      if offset < committed then
        passed[#passed + 1], passed_places[#passed_places + 1] = format('%d', offset), member
      else
        messages[#messages + 1] = {offset = offset, member = member, suspect = i == 1}
        if pops_there then dropped[#dropped + 1] = format('%d', offset) end
      end
    end
    if states[queue] == 'whole' then
      for _, message in ipairs(behind[queue] or {}) do messages[#messages + 1] = message end
      behind[queue] = nil
    end
    if #messages == 0 and states[queue] == 'part' then
      more = true
    else
      spent_names[#spent_names + 1] = name
    end
    if #messages == 0 then return end
    one.open = {queue = queue, class = one.name, messages = messages, at = 1}
    opened[#opened + 1] = one.open
  end
  local function open_next(one)
    while names_looked_at < LOOK_LIMIT do
      local name = redis.call('ZRANGEBYLEX', ready_key, one.from, '(' .. class_prefix(one.name) .. ':', 'LIMIT', 0, 1)[1]
      if not name then break end
      names_looked_at, one.from = names_looked_at + 1, '(' .. name
      local queue = string.sub(name, 20 + #one.name)
      if not states[queue] and tonumber(redis.call('ZSCORE', due_key, queue) or '0') == -1 then
        open_known(one, name, queue)
        if one.open then return true end
      else
        -- A name of a queue that is not waiting, or is waiting under another name.
        spent_names[#spent_names + 1] = name
      end
    end
    if names_looked_at >= LOOK_LIMIT then more = true end
    local queue = one.fresh[one.next_fresh]
    if not queue then return false end
    one.open, one.next_fresh, states[queue] = fresh[queue], one.next_fresh + 1, 'whole'
    return true
  end
  local function give_next(one)
    while true do
      local open = one.open
      local message = open and open.messages[open.at]
      if lacks_permit(one) then return false end
      if message then
        local record = message.record or record_at(message.offset)
        if record then
          if message.suspect then suspects[#suspects + 1] = format('%d', message.offset) end
          if message.member then left_queues[#left_queues + 1] = message.member end
          if not place_of[open.queue] and class_concurrency > 0 then
            one.taken = one.taken + 1
            out_names[#out_names + 1], out_names[#out_names + 2] = '0', class_prefix(one.name) .. '0' .. open.queue
          end
          give(message.offset, open.queue, record)
          open.at = open.at + 1
          if one.permits then
            one.permits = one.permits - 1
            rates[one.name] = one.permits
          end
          return true
        end
        -- Somebody removed a record: what is behind it waits, and is out with nobody.
        states[open.queue], one.open = 'stuck', nil
      else
        one.open = nil
        if lacks_keys(one) or not open_next(one) then return false end
      end
    end
  end
  while #ring < limit - given and visit_next() do end
  while has_room() and #ring > 0 do
    local still, at_class = {}, 1
    while ring[at_class] and has_room() do
      local one = ring[at_class]
      if give_next(one) then
        still[#still + 1] = one
        turn = one.name
      else
        -- Another class has its turn before any has a second one.
        visit_next()
      end
      at_class = at_class + 1
    end
    ring = still
  end
  if given == 0 and visits >= WIDTH then
    -- More classes wait than a call looks at: the next call goes on behind them.
    turn = last_visited
    class_wait = class_wait < 0 and CLASSES_WAIT_MS or math.min(class_wait, CLASSES_WAIT_MS)
  end
  if #due == WIDTH then more = true end

  local function hold(queue, messages, from)
    for i = from, #messages do
      if not messages[i].member then
        held_back[#held_back + 1] = '0'
        held_back[#held_back + 1] = queue_prefix(queue) .. format('%016d', messages[i].offset)
      end
    end
  end
  local deferred = {}
  for _, open in ipairs(opened) do hold(open.queue, open.messages, open.at) end
  for queue, messages in pairs(behind) do hold(queue, messages, 1) end
  for queue, one in pairs(fresh) do
    hold(queue, one.messages, one.at)
    if not place_of[queue] then
      named[#named + 1], named[#named + 2] = '0', index_name(one.class, one.messages[1].offset, queue)
      deferred[#deferred + 1], deferred[#deferred + 2] = '-1', queue
    end
  end

  local function note_classes()
    -- Their queues' times are written by now. A queue that waits anew may have the same name.
    for i = 1, #spent_names, WIDTH do
      redis.call('ZREM', ready_key, unpack(spent_names, i, math.min(i + WIDTH - 1, #spent_names)))
    end
    for i = 1, #named, 2 * WIDTH do
      local upto = math.min(i + 2 * WIDTH - 1, #named)
      redis.call('ZADD', ready_key, unpack(named, i, upto))
      redis.call('ZADD', due_key, unpack(deferred, i, upto))
    end
    if #out_names > 0 then redis.call('ZADD', class_out_key, unpack(out_names)) end
    local full, now_waits = {}, waiting and '1' or '0'
    for class, left in pairs(rates) do
      full[#full + 1], full[#full + 2] = format('%.6f', exact_ms + (class_size - left) / class_per_s * 1000), class
    end
    if #full > 0 then
      redis.call('ZADD', class_rates_key, unpack(full))
      local unused = redis.call('ZRANGEBYSCORE', class_rates_key, '-inf', format('%d', now - FULL_MS), 'LIMIT', 0, WIDTH)
      if #unused > 0 then redis.call('ZREM', class_rates_key, unpack(unused)) end
    end
    if #out_names > 0 then
      local _, reached = sweep_out(swept == '' and '-' or '(' .. swept, '+', 0, 8 + #out_names)
      swept = reached
    end
    if turn ~= (facts[1] or '') or now_waits ~= (facts[2] or '0') or swept ~= (facts[3] or '') then
      redis.call('HSET', lock_key, 'class_turn', turn, 'class_waits', now_waits, 'class_swept', swept)
    end
  end
  return note_classes, class_wait
end
