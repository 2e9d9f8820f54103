#!lua flags=allow-oom
--[[
attempt_start: note that a message is about to be handled, so that it is known if its handler ends the process.

Only where former owners died: whoever takes the lock next finds what was started and never ended.

KEYS
  1 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap
  2 attempts_key  hash    offset -> <failed attempts>:<ms of the first one noted>:<ms of the last>[:<how started>]

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 offset        int     the message
  4 how           string  a: alone, so that it is to blame if its owner dies now; s: beside others

RETURNS
  {"started"}        noted, until it fails or is settled
  {"fenced", epoch}  another epoch is in force; nothing was changed
]]
local lock_key = KEYS[1]
local attempts_key = KEYS[2]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local offset = ARGV[3]
local how = ARGV[4]

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
local noted = redis.call('HGET', attempts_key, offset) or '0'
local count, first, last = string.match(noted, '^(%d+):(%d+):(%d+)')
if not count then
  local time = redis.call('TIME')
  local now = string.format('%d', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  count, first, last = string.match(noted, '^%d+'), now, now
end
redis.call('HSET', attempts_key, offset, table.concat({count, first, last, how}, ':'))
return {'started'}
