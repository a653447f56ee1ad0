"""A first job, on SQLite; set DATABASE_URL to run the same on PostgreSQL."""

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import Mapped, declarative_base, mapped_column

from sqlalchemy_jobs import JobContext, JobSession, Tasks, Worker, metadata

url = os.environ.get("DATABASE_URL", "sqlite:///quickstart.sqlite")
engine = create_engine(url.replace("postgres://", "postgresql://", 1))
tasks = Tasks()


class User(declarative_base()):
    __tablename__ = "quickstart_users"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


@tasks.task("send-welcome")
def send_welcome(job: JobContext) -> None:
    print(f"job {job.id}: welcome, user {job.payload['id']} <{job.payload['email']}>")


metadata.create_all(engine)
User.metadata.create_all(engine)
with JobSession(engine) as session, session.begin():
    session.add(user := User(email="ada@example.org"))
    session.enqueue("send-welcome", lambda: {"id": user.id, "email": user.email})
print(Worker(engine, tasks).run(until_idle=True))
