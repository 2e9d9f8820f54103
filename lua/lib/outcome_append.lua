-- Tell in one entry what became of messages, under the next place of the epoch. The oldest entries go with the same
-- command where `kept` of them wait already; what they told is counted in the new one, with what they had counted.
local function outcome_append(outcomes_key, lock_key, epoch, kept, entry)
  local over, dropped = redis.call('XLEN', outcomes_key) - kept + 1, 0
  if over > 0 then
    for _, oldest in ipairs(redis.call('XRANGE', outcomes_key, '-', '+', 'COUNT', over)) do
      local fields = oldest[2]
      for i = 1, #fields, 2 do
        if fields[i] == 'x' then dropped = dropped + tonumber(fields[i + 1]) end
        if #fields[i] == 1 and string.find('hude', fields[i], 1, true) then
          for first, last in string.gmatch(fields[i + 1], '(%d+)-(%d+)') do dropped = dropped + last - first + 1 end
        end
      end
    end
  end
  if dropped > 0 then entry[#entry + 1], entry[#entry + 2] = 'x', string.format('%d', dropped) end
  local id = string.format('%d-%d', epoch, redis.call('HINCRBY', lock_key, 'outcome_count', 1))
  local added = redis.pcall('XADD', outcomes_key, 'MAXLEN', '=', kept, id, unpack(entry))
  if type(added) ~= 'table' or not added.err then return end
  if not string.find(added.err, 'equal or smaller', 1, true) then error(added.err) end
  -- The lock was lost, and its count with it: go on behind the last place that was given out.
  local facts = redis.call('XINFO', 'STREAM', outcomes_key)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' then
      local of, place = string.match(facts[i + 1], '^(%d+)-(%d+)$')
      id = string.format('%s-%d', of, tonumber(place) + 1)
      redis.call('HSET', lock_key, 'outcome_count', string.format('%d', tonumber(place) + 1))
    end
  end
  redis.call('XADD', outcomes_key, 'MAXLEN', '=', kept, id, unpack(entry))
end
