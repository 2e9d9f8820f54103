#!lua flags=allow-oom
--[[
attempt_count: note how many attempts of a message have failed, as its owner counts them, and since when.

Idempotent, and lowers no count unless attempts are given back: a call whose answer was lost is made again, with those
behind it. The times are for people only.

KEYS
  1 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap
  2 attempts_key  hash    offset -> <failed attempts>:<ms of the first one noted>:<ms of the last>[:<how started>]

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 offset        int     the message
  4 attempts      int     its failed attempts so far
  5 given_back    int     1: lower the count to these, for the circuit breaker opened; else 0

RETURNS
  {"counted", attempts}   failed attempts of the message so far
  {"fenced", epoch}       another epoch is in force; nothing was changed
]]
local lock_key = KEYS[1]
local attempts_key = KEYS[2]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local offset = ARGV[3]
local attempts = tonumber(ARGV[4])
local given_back = ARGV[5] == '1'

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
local noted = redis.call('HGET', attempts_key, offset) or '0'
local known = tonumber(string.match(noted, '^%d+'))
if given_back and attempts > known or not given_back and attempts <= known then return {'counted', known} end
local time = redis.call('TIME')
local now = string.format('%d', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local since = known > 0 and string.match(noted, '^%d+:(%d+):') or now
redis.call('HSET', attempts_key, offset, string.format('%d:%s:%s', attempts, since, now))
return {'counted', attempts}
