// A table that owners on other hosts hold, as a store of rows: what a host without the memory serves to its own processes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "remote_client.hpp"
#include "rows.hpp"

namespace treadle::dataplane {

class RemoteTable : public RowStore {
public:
    // Rows of `number`, asked of `client`. A gather ends as a fault once its ticket is no longer wanted, `patience_ns` past the
    // ticket's deadline, and `give_up_ns` after its start at the latest.
    RemoteTable(std::shared_ptr<RemoteClient> client, int32_t number, int64_t row_count, int64_t row_bytes, int64_t give_up_ns, int64_t patience_ns)
        : RowStore(Tier::remote, row_count, row_bytes), client_(std::move(client)), number_(number), give_up_ns_(give_up_ns), patience_ns_(patience_ns) {}

    Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept override {
        if (count == 0) return Fault::none;
        try {
            const Ticket* const asked_by = Ticket::running();
            const CallRef call = make_call(count, out, asked_by == nullptr ? NO_DEADLINE : asked_by->deadline_ns);
            std::vector<Share> shares = shares_of(*call, {rows, rows + count});
            if (shares.empty()) return Fault::unavailable;  // some row has no owner now
            const TicketRef ticket = call->layers[0].ticket;
            if (const Fault fault = client_->start(call, std::move(shares)); fault != Fault::none) return fault;
            while (!ticket->wait_until(now_ns() + LOOK_NS)) {  // nobody may write to `out` after this
                const bool wanted = asked_by == nullptr || !asked_by->unwanted;
                if (wanted && now_ns() < call->give_up_ns + LOOK_NS) continue;  // the client ends it then, and knows why
                if (client_->cancel(call, 0)) continue;
                client_->wait_closed();
                return Fault::unavailable;
            }
            return ticket->state() == State::complete ? Fault::none : ticket->fault == Fault::none ? Fault::late : ticket->fault;
        } catch (...) {  // no memory for the request
            return Fault::refused;
        }
    }

private:
    static constexpr int64_t LOOK_NS = 2'000'000;  // between two looks whether the rows are still wanted

    CallRef make_call(int64_t count, std::byte* out, int64_t wanted_ns) const {
        const RemoteVersion& version = *client_->version();
        const int64_t now = now_ns(), last = now + give_up_ns_;
        const int64_t give_up = wanted_ns >= last ? last : std::min(last, std::max(now, wanted_ns) + patience_ns_);
        auto call = std::make_shared<Call>();
        call->spread = version.spread();
        call->header.version = version.digest;
        call->header.fingerprint = version.fingerprint;
        call->header.token = version.token;
        call->deadline_ns = std::min(wanted_ns, give_up);
        call->give_up_ns = give_up;
        call->patience_ns = give_up - std::max(now, call->deadline_ns);
        call->whole = call->spread->routes[static_cast<size_t>(version.position(number_))] == nullptr;
        call->layers.push_back({std::make_shared<Ticket>(Job{{}, count, 1}, give_up, nullptr), out, count, row_bytes, 0, {}});
        call->layers[0].ticket->submitted_ns = call->layers[0].ticket->started_ns = now;
        call->numbers.push_back(number_);
        call->row_bytes.push_back(row_bytes);
        return call;
    }

    std::vector<Share> shares_of(const Call& call, std::vector<int64_t> ids) const {
        const Split split(call, 0, now_ns());
        std::vector<Segment> segments{{0, 0, 0, std::move(ids), {}}};
        if (call.whole) return split.whole({gather_work(std::move(segments), call.numbers, call.row_bytes)});
        return split.rows(segments, {client_->version()->position(number_)});
    }

    const std::shared_ptr<RemoteClient> client_;
    const int32_t number_;
    const int64_t give_up_ns_, patience_ns_;
};

}  // namespace treadle::dataplane
