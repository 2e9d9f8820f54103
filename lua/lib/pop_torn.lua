-- include bits_lost

-- Say whether some of what a group with ordered pop keeps was removed: the ack bitmap, or what stands in lanes. The first
-- message that is not settled stands in one, once it was looked at, and its lane has a time.
local function pop_torn(log_key, acks_key, lines_key, due_key, committed, base, top, seen)
  if top > committed and bits_lost(redis.call('STRLEN', acks_key), committed, base, top) then return true end
  if committed == 0 or committed >= seen or redis.call('EXISTS', lines_key, due_key) == 2 then return false end
  -- Where somebody removed its record, nothing helps.
  local id = string.format('%d-0', committed)
  return #redis.call('XRANGE', log_key, id, id) > 0
end
