-- include native_given

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
  local given = native_given(log_key, group)
  return given and math.max(committed, given + 1) or committed
end
