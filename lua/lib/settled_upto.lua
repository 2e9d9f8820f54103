-- Return the first offset that a native group has not settled, or `committed` where that is higher: all that was given and
-- is not pending is settled. Without the native group nobody knows.
local function settled_upto(log_key, group, committed)
  local pending = redis.pcall('XPENDING', log_key, group)
  if pending.err then return committed end
  local low = pending[2]
  if pending[1] > 0 then
    local offset, part = string.match(low, '^(%d+)-(%d+)$')
    return math.max(committed, tonumber(offset) + (part == '0' and 0 or 1))
  end
  for _, facts in ipairs(redis.call('XINFO', 'GROUPS', log_key)) do
    local named = {}
    for i = 1, #facts, 2 do named[facts[i]] = facts[i + 1] end
    if named['name'] == group then low = named['last-delivered-id'] end
  end
  return low and math.max(committed, tonumber(string.match(low, '^%d+')) + 1) or committed
end
