#!lua
--[[
log_append: append runs of messages to one partition, each run only where its LP's chain continues.

A run is consecutive seqs of one source in one LP. Its first seq must be mark + 1: lower ones are there
already and are skipped, a higher one is refused with the mark. The refusal of a run leaves the others alone.

KEYS
  1 log_key       stream  the partition's records, entry id <offset>-0
  2 meta_key      hash    state, range of LPs, next offset
  3 marks_key     hash    <source>:<lp> -> highest seq that is in the partition

ARGV
  1 source        int     who numbered the messages
  2 backlog       int     refuse when the stream holds this many records; 0: no limit
  3 run_count     int     1 to 500
  4 ...           per run: lp, first seq, count; then per message, in the order of the runs: facts, key, body

RETURNS
  {"ok", offset}                      all appended; offset is the first one's
  {"mixed", offset, word, n, mark, ...}   per run: "ok" (n appended), "dup" (the last n appended, the rest was
                                      there), "gap" (nothing; the mark), "unowned" (nothing; LP not served here)
  {"sealed", change}                  nothing appended: closed for this change
  {"importing", change}               nothing appended: not open yet
  {"absent"}                          nothing appended: no such partition on this node
  {"full", length}                    nothing appended: at its backlog limit
  {"toolarge", count}                 nothing appended: more than 500 messages
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]
local source = ARGV[1]
local backlog = tonumber(ARGV[2])
local run_count = tonumber(ARGV[3])

local meta = redis.call('HMGET', meta_key, 'state', 'lp_from', 'lp_to', 'next', 'change')
local state = meta[1]
if not state then return {'absent'} end
if state ~= 'open' then return {state, meta[5] or ''} end
if backlog > 0 then
  local length = redis.call('XLEN', log_key)
  if length >= backlog then return {'full', length} end
end

local lp_from, lp_to, offset = tonumber(meta[2]), tonumber(meta[3]), tonumber(meta[4])
local fields = {}
local total = 0
for i = 1, run_count do
  local at = 3 * i + 1
  fields[i] = source .. ':' .. ARGV[at]
  total = total + tonumber(ARGV[at + 2])
end
if total > 500 or run_count > 500 then return {'toolarge', total} end
if #ARGV ~= 3 + 3 * run_count + 3 * total then
  return redis.error_reply('ERR log_append: counts do not match the messages given')
end
local marks = redis.call('HMGET', marks_key, unpack(fields))

local first_offset = offset
local report = {'mixed', first_offset}
local whole = true
local raised = {}
local at = 4 + 3 * run_count
for i = 1, run_count do
  local lp, first, count = tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2]), tonumber(ARGV[3 * i + 3])
  local mark = tonumber(marks[i] or '0')
  local word, appended = 'ok', count
  if lp < lp_from or lp >= lp_to then
    word, appended = 'unowned', 0
  elseif first > mark + 1 then
    word, appended = 'gap', 0
  elseif first <= mark then
    word, appended = 'dup', math.max(0, first + count - 1 - mark)
  end
  if appended > 0 then
    local skipped = count - appended
    local identity = fields[i] .. ':'
    local seq = first + skipped
    for j = at + 3 * skipped, at + 3 * count - 1, 3 do
      redis.call('XADD', log_key, string.format('%d-0', offset),
        'm', string.format('%s%d:%s', identity, seq, ARGV[j]), 'k', ARGV[j + 1], 'b', ARGV[j + 2])
      offset = offset + 1
      seq = seq + 1
    end
    mark = seq - 1
    raised[#raised + 1] = fields[i]
    raised[#raised + 1] = string.format('%d', mark)
  end
  if word ~= 'ok' then whole = false end
  report[#report + 1] = word
  report[#report + 1] = appended
  report[#report + 1] = mark
  at = at + 3 * count
end
if #raised > 0 then
  redis.call('HSET', meta_key, 'next', string.format('%d', offset))
  redis.call('HSET', marks_key, unpack(raised))
end
if whole then return {'ok', first_offset} end
return report
