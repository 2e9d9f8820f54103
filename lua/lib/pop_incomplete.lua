-- include bitmap_lost

-- Say whether some of what a group with ordered pop keeps was removed: the ack bitmap, or what stands in queues. The first
-- message that is not settled stands in one, once it was looked at, and its queue has a time.
local function pop_incomplete(log_key, acks_key, queues_key, due_key, committed, base, top, examined)
  if top > committed and bitmap_lost(redis.call('STRLEN', acks_key), committed, base, top) then return true end
  if committed == 0 or committed >= examined or redis.call('EXISTS', queues_key, due_key) == 2 then return false end
  -- Where somebody removed its record, nothing helps.
  local id = string.format('%d-0', committed)
  return #redis.call('XRANGE', log_key, id, id) > 0
end
