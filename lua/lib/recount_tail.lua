-- Count the records from an offset on, `limit` of them at most: their marks first, since `next` is what says that they are
-- counted. Neither is lowered. A call that ended in its middle leaves such records; what it appended is taken as it is,
-- because consumers may have read it already.
-- Return the offset behind them, and the command record where they end with it.
local function recount_tail(log_key, meta_key, marks_key, first, limit)
  local names, seqs, behind, command = {}, {}, first, nil
  for _, entry in ipairs(redis.call('XRANGE', log_key, string.format('%d-0', first), '+', 'COUNT', limit)) do
    local offset, part = string.match(entry[1], '^(%d+)-(%d+)$')
    if part == '0' then
      local name, seq = string.match(entry[2][2], '^(%d+:%d+):(%d+):')
      if name then
        if not seqs[name] then names[#names + 1] = name end
        seqs[name] = math.max(seqs[name] or 0, tonumber(seq))
      end
      behind = tonumber(offset) + 1
    else
      command = entry
    end
  end
  if #names > 0 then
    local raised = {}
    for i, mark in ipairs(redis.call('HMGET', marks_key, unpack(names))) do
      local seq = seqs[names[i]]
      if seq > tonumber(mark or '0') then
        raised[#raised + 1], raised[#raised + 2] = names[i], string.format('%d', seq)
      end
    end
    if #raised > 0 then redis.call('HSET', marks_key, unpack(raised)) end
  end
  if behind > tonumber(redis.call('HGET', meta_key, 'next') or '1') then
    redis.call('HSET', meta_key, 'next', string.format('%d', behind))
  end
  return behind, command
end
