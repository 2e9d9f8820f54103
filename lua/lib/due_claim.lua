-- Give these offsets to a member, and drop them from the due ones. Return entries, what is noted of each ('' for nothing),
-- and the offsets that are not there: settled meanwhile, or removed from the stream.
local function due_claim(log_key, attempts_key, due_key, group, member, offsets)
  local ids, given, entries, notes, missing = {}, {}, {}, {}, {}
  for i, offset in ipairs(offsets) do ids[i] = offset .. '-0' end
  for _, entry in ipairs(redis.call('XCLAIM', log_key, group, member, 0, unpack(ids))) do
    if entry then
      local offset = string.match(entry[1], '^%d+')
      given[offset] = true
      entries[#entries + 1] = entry
      notes[#entries] = redis.call('HGET', attempts_key, offset) or ''
    end
  end
  -- After the member has them: what is with nobody and not due would never be given again.
  redis.call('ZREM', due_key, unpack(offsets))
  for _, offset in ipairs(offsets) do
    if not given[offset] then missing[#missing + 1] = tonumber(offset) end
  end
  return entries, notes, missing
end
