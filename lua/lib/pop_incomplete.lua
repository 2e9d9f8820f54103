-- include bitmap_lost

-- Say whether some of what a group with ordered pop keeps was removed, or is what a call left that ended in its middle: the
-- lock tells how many batches are packed, and how many messages stand in queues.
local function pop_incomplete(log_key, acks_key, queues_key, due_key, batches_key, committed, base, top, examined, packed, queued)
  if top > committed and bitmap_lost(redis.call('STRLEN', acks_key), committed, base, top) then return true end
  if tonumber(redis.call('HGET', batches_key, '=') or '0') ~= packed then return true end
  if redis.call('ZCARD', queues_key) ~= queued then return true end
  if packed + queued > 0 then return redis.call('EXISTS', due_key) == 0 end
  if committed == 0 or committed >= examined then return false end
  -- Where somebody removed its record, nothing helps.
  local id = string.format('%d-0', committed)
  return #redis.call('XRANGE', log_key, id, id) > 0
end
