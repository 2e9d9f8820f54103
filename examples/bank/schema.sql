-- What the bank adds to pgbench's tables: the trigger that publishes, and the read model with what is noted of its making.

CREATE SCHEMA bank;
GRANT USAGE ON SCHEMA bank TO teller, bank_consumer, bank_worker;

-- One message body: what changed, the balance after it, and when, in microseconds by this database's clock.
CREATE FUNCTION bank.entry(p_delta int, p_balance int) RETURNS bytea LANGUAGE sql
    RETURN convert_to(format('{"delta":%s,"balance":%s,"at":%s}', p_delta, p_balance,
                             (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), 'UTF8');

-- pgbench's transaction inserts into its history last, so both rows hold the balance after it, locked until commit.
CREATE FUNCTION bank.publish_entries() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_account int;
    v_branch int;
BEGIN
    SELECT abalance INTO STRICT v_account FROM pgbench_accounts WHERE aid = NEW.aid;
    SELECT bbalance INTO STRICT v_branch FROM pgbench_branches WHERE bid = NEW.bid;
    PERFORM mqlayer_app.publish_many_v1(
        ARRAY['bank.entries', 'bank.entries'],
        ARRAY['a:' || NEW.aid, 'b:' || NEW.bid],
        ARRAY[bank.entry(NEW.delta, v_account), bank.entry(NEW.delta, v_branch)]);
    RETURN NULL;
END $$;
CREATE TRIGGER publish_entries AFTER INSERT ON pgbench_history FOR EACH ROW EXECUTE FUNCTION bank.publish_entries();

-- The read model: the sum of the deltas applied, and what the last message said the balance is.
CREATE TABLE bank.balance (
    key     text NOT NULL,
    balance bigint NOT NULL,
    said    bigint NOT NULL,
    entries int NOT NULL DEFAULT 1,
    CONSTRAINT balance_key PRIMARY KEY (key)
) WITH (fillfactor = 60);

-- A message whose balance before is not the one that the message before it left.
CREATE TABLE bank.violation (
    key      text NOT NULL,
    expected bigint NOT NULL,
    found    bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What was refused: effects that were there before or a stale owner's, and what was said of a message under a stale token.
CREATE TABLE bank.refusal (
    key  text,
    kind text NOT NULL,
    at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- From publish to effect, by one clock. Unlogged: a measurement, not part of the model.
CREATE UNLOGGED TABLE bank.latency (
    applied_at timestamptz NOT NULL,
    ms         real NOT NULL
);
CREATE INDEX latency_applied_at ON bank.latency (applied_at);

-- Apply one message: one round trip. Called behind the fence, so each message comes here once, in the order of its key.
CREATE FUNCTION bank.apply_entry(p_key text, p_delta int, p_balance int, p_at bigint) RETURNS void
    LANGUAGE plpgsql AS $$
DECLARE
    v_said bigint;
    v_now timestamptz := clock_timestamp();
BEGIN
    SELECT said INTO v_said FROM bank.balance WHERE key = p_key;
    IF FOUND THEN
        UPDATE bank.balance SET balance = balance + p_delta, said = p_balance, entries = entries + 1 WHERE key = p_key;
    ELSE
        -- pgbench opens every account and branch with 0.
        v_said := 0;
        INSERT INTO bank.balance (key, balance, said) VALUES (p_key, p_delta, p_balance);
    END IF;
    IF v_said <> p_balance - p_delta THEN
        INSERT INTO bank.violation (key, expected, found) VALUES (p_key, v_said, p_balance - p_delta);
    END IF;
    INSERT INTO bank.latency (applied_at, ms)
        VALUES (v_now, extract(epoch FROM v_now) * 1000 - p_at / 1000.0);
END $$;

-- Who applies: members in processes of their own, and those that the worker hosts.
GRANT SELECT, INSERT, UPDATE ON bank.balance TO bank_consumer, bank_worker;
GRANT INSERT ON bank.violation, bank.refusal, bank.latency TO bank_consumer, bank_worker;
