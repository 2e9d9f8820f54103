-- include outcome_append

-- Tell in one entry what a call settles that no earlier one did; nothing where none is `kept`. `fresh`: by letter, first and last offset in turn.
local function settled_append(outcomes_key, lock_key, epoch, kept, member, fresh, reads, failed)
  local count = 0
  for _, line in pairs(fresh) do count = count + #line end
  if count == 0 or kept == 0 then return end
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local entry = {'m', member, 't', string.format('%d', now)}
  local function add(name, value)
    if value ~= '' then entry[#entry + 1], entry[#entry + 2] = name, value end
  end
  for name, line in pairs(fresh) do
    local ranges = {}
    for i = 1, #line, 2 do ranges[#ranges + 1] = string.format('%d-%d', line[i], line[i + 1]) end
    add(name, table.concat(ranges, ','))
  end
  add('r', reads)
  add('a', table.concat(failed, ','))
  outcome_append(outcomes_key, lock_key, epoch, kept, entry)
end
