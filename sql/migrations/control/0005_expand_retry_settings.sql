-- What a group does with messages that fail, besides its waits: how often each is tried, what is not worth another
-- attempt, how long one may take, and what becomes of it in the end.

ALTER TABLE mqlayer.consumer_group
    -- Failed attempts after which the policy decides.
    ADD COLUMN attempt_limit  int NOT NULL DEFAULT 17,
    ADD COLUMN policy         text NOT NULL DEFAULT 'park',
    -- Up to which part of a wait is left out by chance.
    ADD COLUMN backoff_jitter double precision NOT NULL DEFAULT 0,
    -- Names of exceptions: final at their first attempt; and tried again, where that is not all that are not final.
    ADD COLUMN final_errors   text[] NOT NULL DEFAULT '{}',
    ADD COLUMN retried_errors text[] NOT NULL DEFAULT '{}',
    -- Seconds that a handler has for a message, and up to which it may extend that; null: no limit.
    ADD COLUMN time_limit_s   double precision,
    ADD COLUMN time_cap_s     double precision,
    ADD CONSTRAINT consumer_group_attempt_limit CHECK (attempt_limit >= 1),
    ADD CONSTRAINT consumer_group_policy CHECK (policy IN ('park', 'block', 'dead_letter', 'skip')),
    ADD CONSTRAINT consumer_group_backoff_jitter CHECK (backoff_jitter BETWEEN 0 AND 1),
    ADD CONSTRAINT consumer_group_time_limit CHECK (time_limit_s > 0 AND time_limit_s < 'Infinity'),
    ADD CONSTRAINT consumer_group_time_cap CHECK (time_cap_s > 0 AND time_cap_s < 'Infinity');
