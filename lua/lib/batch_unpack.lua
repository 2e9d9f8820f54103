-- include settled_in
-- include attempt_parts
-- include queue_prefix

-- Name of a batch in `due`; no key begins with this byte.
local function batch_name(number) return '\254' .. number end

-- Put what is not settled of a packed batch into its queues, each message out by itself until `until_ms`. The count of
-- packed batches changes first; the caller tells the lock.
local function batch_unpack(number, packed_batch, committed, base, top, until_ms)
  local attempt, given_ms, offsets, queues, queue_of = unpack(cmsgpack.unpack(packed_batch))
  local is_settled = settled_in(acks_key, committed, base, top, offsets)
  local left, members, pops, due, closed = {}, {}, {}, {}, {}
  for i, offset in ipairs(offsets) do
    if not is_settled(offset) then
      local n, name, queue = #left + 1, string.format('%d', offset), queues[queue_of[i] or 1]
      left[n] = name
      members[2 * n - 1], members[2 * n] = '0', queue_prefix(queue) .. string.format('%016d', offset)
      pops[2 * n - 1], pops[2 * n] = name, string.format('%s:%d:', number, until_ms) .. queue
      if not closed[queue] then
        closed[queue] = true
        due[#due + 1], due[#due + 2] = string.format('%d', until_ms), queue
      end
    end
  end
  redis.call('HINCRBY', batches_key, '=', -1)
  redis.call('HDEL', batches_key, number, attempt)
  if #left > 0 then
    local times, counts = redis.call('HMGET', attempts_key, unpack(left)), {}
    for i, name in ipairs(left) do
      local count, first, _, failed = attempt_parts(times[i])
      counts[2 * i - 1] = name
      counts[2 * i] = string.format('%d:%s:%d:%d', count + 1, first or string.format('%d', given_ms), given_ms, failed)
    end
    redis.call('ZADD', queues_key, unpack(members))
    redis.call('HSET', pops_key, unpack(pops))
    redis.call('HSET', attempts_key, unpack(counts))
    local slot = string.format('#%d', tonumber(number) % KEPT_BATCHES)
    local oldest = redis.call('HGET', batches_key, slot)
    local noted = oldest and string.match(redis.call('HGET', batches_key, oldest) or '', '^(%d+):')
    if noted and tonumber(noted) % KEPT_BATCHES == tonumber(number) % KEPT_BATCHES then
      redis.call('HDEL', batches_key, oldest)
    end
    redis.call('HSET', batches_key, slot, attempt, attempt, number .. ':' .. table.concat(left, ','))
    redis.call('ZADD', due_key, unpack(due))
  end
  redis.call('ZREM', due_key, batch_name(number))
end
