#!lua
--[[
log_append: append runs of messages to one partition, each run only where its LP's chain continues.

A run is consecutive seqs of one source in one LP. Its first seq must be mark + 1: lower ones are there
already and are skipped, a higher one is refused with the mark. The refusal of a run leaves the others alone.

Records come first, then the marks, then `next`: a call that ends in between leaves records behind `next`. Whoever
appends or seals next finds an entry id in use and counts them first, so what was appended stays, once.

KEYS
  1 log_key       stream  the partition's records, entry id <offset>-0
  2 meta_key      hash    state, range of LPs, next offset
  3 marks_key     hash    <source>:<lp> -> highest seq that is in the partition
  4 ended_key     set     the node's: sources of outboxes that go on under others
  5 terms_key     hash    the node's: source -> the token of the term of its outbox that counts

ARGV
  1 source        int     who numbered the messages
  2 backlog       int     refuse when the stream holds this many records; 0: no limit; -1: none, and of what the
                          partition held before also under a source that is ended; -2: that, unless the source is
                          closed, since what goes on in its place may be here already
  3 term          str     the token of the term of the outbox's Postgres in which this was read: nothing of another one
                          is taken; empty where what was read can't be lost
  4 run_count     int     1 to 500
  5 ...           per run: lp, first seq, count; then per message, in the order of the runs: facts, key, body

RETURNS
  {"ok", offset}                      all appended; offset is the first one's
  {"mixed", offset, word, n, mark, ...}   per run: "ok" (n appended), "dup" (the last n appended, the rest was
                                      there), "gap" (nothing; the mark), "unowned" (nothing; LP not served here)
  {"sealed", change}                  nothing appended: closed for this change
  {"importing", change}               nothing appended: not open yet
  {"deleted", change}                 nothing appended: only its tombstone is left
  {"absent"}                          nothing appended: no such partition on this node, or it lost its records or marks
  {"ended", source}                   nothing appended: its outbox goes on, or is to go on, under another source
  {"stale", term}                     nothing appended: another term of the source's outbox counts; empty: none yet
  {"full", length}                    nothing appended: at its backlog limit
  {"too_large", count}                nothing appended: more than 500 messages
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]
local ended_key = KEYS[4]
local terms_key = KEYS[5]
local source = ARGV[1]
local backlog = tonumber(ARGV[2])
local term = ARGV[3]
local run_count = tonumber(ARGV[4])

-- include recount_tail

local function append(counted)
  -- Locals: 500 messages use them thousands of times, and each use of a global is a lookup by name.
  local call, format, argv, log_key = redis.call, string.format, ARGV, log_key

  local meta = call('HMGET', meta_key, 'state', 'lp_from', 'lp_to', 'next')
  local state = meta[1]
  if not state then return {'absent'} end
  if state ~= 'open' then return {state, call('HGET', meta_key, state == 'sealed' and 'sealed_for' or 'change') or ''} end
  if backlog ~= -1 and call('SISMEMBER', ended_key, backlog == -2 and source .. ':closed' or source) == 1 then
    return {'ended', source}
  end
  if term ~= '' then
    local counts_now = call('HGET', terms_key, source)
    if counts_now ~= term then return {'stale', counts_now or ''} end
  end
  if backlog > 0 then
    local length = call('XLEN', log_key)
    if length >= backlog then return {'full', length} end
  end

  local lp_from, lp_to, offset = tonumber(meta[2]), tonumber(meta[3]), tonumber(meta[4])
  local fields, firsts, counts, known = {}, {}, {}, {}
  local total = 0
  local at = 5
  for i = 1, run_count do
    fields[i] = source .. ':' .. argv[at]
    if known[fields[i]] then return redis.error_reply('ERR log_append: two runs of one LP in a call') end
    known[fields[i]] = true
    firsts[i] = tonumber(argv[at + 1])
    counts[i] = tonumber(argv[at + 2])
    total = total + counts[i]
    at = at + 3
  end
  if total > 500 or run_count > 500 then return {'too_large', total} end
  if #argv ~= 4 + 3 * run_count + 3 * total then
    return redis.error_reply('ERR log_append: counts do not match the messages given')
  end
  local marks = call('HMGET', marks_key, unpack(fields))

  -- The usual case needs no report: every run is served here and continues its chain.
  local report, is_new = nil, false
  for i = 1, run_count do
    local lp = tonumber(argv[3 * i + 2])
    if not marks[i] then is_new = true end
    if lp < lp_from or lp >= lp_to or firsts[i] ~= (marks[i] or 0) + 1 then
      report = {'mixed', offset}
      break
    end
  end
  -- A partition that has records has marks: without them every seq would look like the first one.
  if is_new and offset > 1 and call('EXISTS', marks_key) == 0 and call('XLEN', log_key) > 0 then return {'absent'} end
  if report and not counted and recount_tail(log_key, meta_key, marks_key, offset, 500) > offset then return append(true) end

  local first_offset = offset
  local raised, raised_count = {}, 0
  at = 5 + 3 * run_count
  for i = 1, run_count do
    local first, count, skipped = firsts[i], counts[i], 0
    if report then
      local lp, mark, word = tonumber(argv[3 * i + 2]), tonumber(marks[i] or 0), 'ok'
      if lp < lp_from or lp >= lp_to then
        word, skipped = 'unowned', count
      elseif first > mark + 1 then
        word, skipped = 'gap', count
      elseif first <= mark then
        word, skipped = 'dup', math.min(count, mark + 1 - first)
      end
      local n = #report
      report[n + 1], report[n + 2] = word, count - skipped
      report[n + 3] = skipped < count and first + count - 1 or mark
    end
    if skipped < count then
      local field, seq = fields[i], argv[3 * i + 3]
      local identity = field .. ':'
      for k = skipped, count - 1 do
        local j = at + 3 * k
        if k > 0 then seq = format('%d', first + k) end
        if offset == first_offset then
          local id, m, added = format('%d-0', offset), identity .. seq .. ':' .. argv[j], nil
          if offset == 1 then
            added = redis.pcall('XADD', log_key, id, 'm', m, 'k', argv[j + 1], 'b', argv[j + 2])
          else
            added = redis.pcall('XADD', log_key, 'NOMKSTREAM', id, 'm', m, 'k', argv[j + 1], 'b', argv[j + 2])
          end
          if not added then return {'absent'} end
          if type(added) == 'table' then
            if counted or not string.find(added.err, 'equal or smaller', 1, true) then return added end
            recount_tail(log_key, meta_key, marks_key, offset, 500)
            return append(true)
          end
        else
          call('XADD', log_key, format('%d-0', offset),
            'm', identity .. seq .. ':' .. argv[j], 'k', argv[j + 1], 'b', argv[j + 2])
        end
        offset = offset + 1
      end
      raised[raised_count + 1], raised[raised_count + 2] = field, seq
      raised_count = raised_count + 2
    end
    at = at + 3 * count
  end
  if raised_count > 0 then
    call('HSET', marks_key, unpack(raised))
    call('HSET', meta_key, 'next', format('%d', offset))
  end
  return report or {'ok', first_offset}
end

return append(false)
