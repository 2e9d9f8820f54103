-- Rows of best_effort topics that can never be sent. A void record has taken the place of each in its partition, so that
-- its LP goes on; the row itself is kept here for an operator, who has it published anew, at the end, or discards it.
-- Named by its number in the outbox, which an adopted outbox keeps. What came of it stays, without the message: a node
-- that falls back has relays come to the row again.
CREATE TABLE mqlayer_app.voided (
    id         bigint NOT NULL,
    topic_id   int NOT NULL,
    lp         smallint NOT NULL,
    seq        bigint NOT NULL,
    reason     text NOT NULL,
    created_at timestamptz NOT NULL,
    key        text,
    headers    text,
    body       bytea,
    voided_at  timestamptz NOT NULL DEFAULT now(),
    ended      text,
    ended_at   timestamptz,
    CONSTRAINT voided_key PRIMARY KEY (id),
    CONSTRAINT voided_ended CHECK (ended IN ('published', 'discarded')),
    CONSTRAINT voided_keeps_its_message CHECK ((ended IS NULL) = (body IS NOT NULL) AND (ended IS NULL) = (ended_at IS NULL))
);
